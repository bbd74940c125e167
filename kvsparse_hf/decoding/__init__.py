"""Decoding loops for Transformers' `custom_generate=` hook."""

from .fast import FastDecode, fast_decode

__all__ = ["FastDecode", "fast_decode"]
