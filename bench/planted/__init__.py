"""The system judged on the planted model: its true effects, and sweeps against them."""
