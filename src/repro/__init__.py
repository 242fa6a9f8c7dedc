"""Reproduction of hierarchical ZeRO++, ExFlow and Flover. The engines are `repro.zero`, `repro.exflow` and `repro.flover`."""

__version__ = "0.1.0"
