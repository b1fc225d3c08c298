"""Cuts one model over several GPUs of a host: tensor parallelism, for what does not fit one."""
