"""An independent judge: the VADER lexicon (Hutto and Gilbert 2014) reads the stories; it is never a reward."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hybrid_rlhf.data.chat import encode_prompt
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.models.tokenizer import load_tokenizer

NUM_SAMPLES, NUM_TOKENS = 64, 48


def continuations(model_dir: str, openings: list[str], seed: int = 0, temperature: float = 1.0) -> list[str]:
    """NUM_SAMPLES continuations of exactly NUM_TOKENS new tokens for each opening."""
    tokenizer = load_tokenizer(model_dir)
    engine = HybridEngine.for_inference(load_causal_lm(ModelConfig(model_dir)), tokenizer)
    sampling = SamplingConfig(max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, temperature=temperature)
    prompts = [encode_prompt(tokenizer, opening) for opening in openings for _ in range(NUM_SAMPLES)]
    with engine.inference():
        tokens = engine.generate(prompts, sampling, seed).tokens
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def distinct(texts: list[str], n: int = 2) -> float:
    """Distinct n-grams of words over all n-grams (Li et al., 1510.03055), pooled over the texts."""
    grams = [tuple(words[i : i + n]) for words in (t.lower().split() for t in texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def judge(model_dir: str, openings: list[str], seed: int = 0) -> dict[str, float]:
    """Mean VADER compound (-1 to 1) of the continuations, its standard error, distinct-2 and three samples."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    texts = continuations(model_dir, openings, seed)
    analyzer = SentimentIntensityAnalyzer()
    compound = torch.tensor([analyzer.polarity_scores(t)["compound"] for t in texts])
    return {"compound": float(compound.mean()), "standard_error": float(compound.std() / len(texts) ** 0.5),
            "distinct_2": distinct(texts), "samples": texts[:: max(1, len(texts) // 8)][:8]}
