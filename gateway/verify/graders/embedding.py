"""Cosine of the two answers' embeddings: shown with its threshold of 0.85, never decisive alone.

Measured on open text it tells good answers from bad no better than a coin (AUC 0.50), above the threshold and below.
"""

from __future__ import annotations

from backends.errors import UnsupportedByBackend
from gateway.outcomes.answer_grading import visible_text
from gateway.store.verifications import Spent
from gateway.verify.answer_pair import AnswerPair, Grade, Spend
from policies.pricing import embedding_price_usd

THRESHOLD = 0.85


class EmbeddingGrader:
    """Cosine similarity, -1..1, of vectors made by the cheaper of the two tiers that makes any.

    Only these two are asked: no other tier need be permitted to see the texts.
    """

    name = "embedding"
    needs_top_answer = True
    reads_calls = False

    async def grade(self, pair: AnswerPair, spend: Spend) -> Grade | None:
        party = next((each for each in (pair.cheap, pair.top) if "embed" in each.backend.capabilities), None)
        if pair.top_answer is None or party is None:
            return None
        texts = (visible_text(pair.cheap_answer), visible_text(pair.top_answer))
        if not all(texts):
            return None
        try:
            embedded = await party.backend.embed(texts)
        except UnsupportedByBackend:
            return None
        spend(Spent(embedding_price_usd(party.tier, embedded.usage.prompt_tokens)))
        one, other = embedded.vectors
        cosine = sum(a * b for a, b in zip(one, other, strict=True))
        return Grade(cosine, {"above_threshold": float(cosine >= THRESHOLD)})
