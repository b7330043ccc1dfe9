"""Training data: formats, tokenizers, documents with loss masks, the cache of tokens, packing into windows."""
