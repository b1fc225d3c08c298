"""Runs steps without a host in the way: buffers that stay where they are, captured graphs, draws on the device."""
