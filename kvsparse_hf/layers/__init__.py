"""What one decoder layer holds. Layers know Transformers only through `hf`, and methods not at all."""
