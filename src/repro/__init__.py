"""Hierarchical ZeRO++, ExFlow and Flover, reproduced. The engines are `repro.zero`, `repro.exflow`, `repro.flover`."""

__version__ = "0.1.0"
