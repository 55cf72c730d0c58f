"""A model under its plan against the same model on one process: whether both train alike, and what differs most."""

from paraflow.verification.report import Measured, Verification
from paraflow.verification.verify import verify

__all__ = ["Measured", "Verification", "verify"]
