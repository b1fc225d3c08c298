"""Errors of learning a router from the log.

::

    LearningError
    ├── NothingToLearn     too few checked answers, or none that the serving router's kind could use
    └── RetrainRefused     another retrain is under way, or there is no router to start from
"""

from __future__ import annotations


class LearningError(Exception):
    """Base of the tree."""


class NothingToLearn(LearningError):
    pass


class RetrainRefused(LearningError):
    pass
