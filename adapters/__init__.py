"""Hosts that run pipelines: Hugging Face transformers, the command line, the embedded model's demo."""
