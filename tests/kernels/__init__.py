"""Every kernel against its float64 reference: under Triton's interpreter on the CPU, for real where there is a GPU."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
