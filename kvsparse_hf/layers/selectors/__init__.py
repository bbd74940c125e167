"""What one decode step reads: small objects that a `SelectingLayer` asks."""
