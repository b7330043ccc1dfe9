"""What a model is: its shape and parameters, read from a config, a Hugging Face file or a function."""
