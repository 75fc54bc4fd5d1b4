"""What is wrong with a machine or a run: symptoms read from a log, and :mod:`forebay.doctor.environment`."""

from forebay.doctor.diagnose import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
