"""Tokenizers as those of real models: Yes and No are tokens of their own, with and without a space, in three cases."""

from __future__ import annotations

from tests.factories.tiny import TEXTS

# so often that all of them become one token each; YES and NO stand at the beginning of a line only, as in real texts
WORDS = ["Yes\nyes\nYES\nNo\nno\nNO\nA\nB\n", "so Yes or No, yes or no, A or B.",
         "Nothing. Note: nobody knows. Yesterday."] * 40


def byte_level_tokenizer():
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen: a word behind a space is a token of its own, written with G dotted
    for the space."""
    from hybrid_rlhf.data.chat import CHATML
    from hybrid_rlhf.models.tokenizer import train_tokenizer

    made = train_tokenizer([*TEXTS, *WORDS], 420)
    made.chat_template = CHATML
    return made


def sentencepiece_tokenizer():
    """BPE with sentencepiece's pieces, as of Llama 2 and Mistral: a space is \u2581, unknown letters are bytes, and
    where a template ends without one the reply's first word begins with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=[
        "<pad>", "<s>", "<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))])
    backend.train_from_iterator([*TEXTS, *WORDS], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                   unk_token="<unk>", clean_up_tokenization_spaces=False)
    made.chat_template = ("{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}</s>"
                          "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}")
    return made
