"""Models here are so small that a second thread only adds waiting."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
