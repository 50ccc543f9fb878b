"""ckpttools: inspect, validate, hash and convert model checkpoints, offline and without the training stack."""

__version__ = "0.1.0"
