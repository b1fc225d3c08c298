"""Turns token ids into token ids: sequences, KV blocks, batches, kernels; no HTTP, no money."""
