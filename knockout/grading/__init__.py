"""Grades: maths, IFEval and any lm-eval task, in worker processes that can be killed."""

from knockout.grading.grade import Grade

__all__ = ["Grade"]
