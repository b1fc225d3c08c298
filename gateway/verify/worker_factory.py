"""Puts the parts of verification together for a process: the server's own worker, or one that stands alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.config import LocalModelConfig
from gateway.access.admission import Admission
from gateway.access.spending_lease import SpendingLease
from gateway.models.catalog import Catalog
from gateway.store.feedback import FeedbackBook
from gateway.store.store import Store
from gateway.store.verifications import VerificationQueue
from gateway.verify.answer_checker import AnswerChecker, make_graders
from gateway.verify.check_sampler import CheckSampler
from gateway.verify.grader_combination import GraderCombination
from gateway.verify.live_load import LiveLoad
from gateway.verify.metrics import VerificationMetrics
from gateway.verify.worker import VerificationWorker

if TYPE_CHECKING:
    from gateway.config.settings import Settings

_BUILTIN = "builtin:"


def make_worker(
    settings: Settings,
    catalog: Catalog,
    store: Store,
    *,
    admission: Admission | None = None,
    sampler: CheckSampler | None = None,
    lease: SpendingLease | None = None,
) -> VerificationWorker:
    """Return a worker over open parts, not yet started.

    Raises
    ------
    CombinationUnusable
    """
    config = settings.verification
    combination = GraderCombination.load(config.combination, portable_only=needs_portable(settings))
    return VerificationWorker(
        config,
        VerificationQueue(store),
        FeedbackBook(store),
        AnswerChecker(catalog, make_graders(config.graders), combination),
        LiveLoad(admission, catalog.backends.values(), config.max_live_requests),
        VerificationMetrics(),
        sampler=sampler,
        lease=lease,
        keep_texts=settings.log.prompts == "full",
    )


def needs_portable(settings: Settings) -> bool:
    """Return whether the shipped combination meets other models than those whose probabilities it was fitted on."""
    if settings.verification.combination != "builtin":
        return False
    served = [settings.models.get(tier.model) for tier in settings.ladder]
    return not all(isinstance(each, LocalModelConfig) and str(each.path).startswith(_BUILTIN) for each in served)
