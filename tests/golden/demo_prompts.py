"""Twenty prompts for the demo model: lengths around blocks (16) and chunks (64), Unicode, shared prefixes.

Plain data. `TALE` prefixes of n words have the lengths their names say, in tokens of the demo model.
"""

from __future__ import annotations

TALE = (
    "The lighthouse keeper counted the ships that passed each night and wrote their names in a small blue book. "
    "On the first day of spring he noticed that one of them had no name at all, only a painted star on its bow. "
    "He asked the fishermen in the harbour whether they knew it, but every one of them told a different story. "
    "The oldest said that the ship carried letters which had never been delivered, and that it would go on sailing "
    "until someone read them aloud. So the keeper rowed out with a lantern, a loaf of bread and his spectacles, and "
    "began to read. The first letter was short and said only this:"
)


def _tale(last_words: str) -> str:
    return TALE[: TALE.index(last_words) + len(last_words)]


PROMPTS: dict[str, str] = {
    "1 token": "The",
    "2 tokens": "The lighthouse",
    "15 tokens": _tale("wrote their names in"),
    "16 tokens": _tale("wrote their names in a"),
    "17 tokens": _tale("wrote their names in a small"),
    "31 tokens": _tale("noticed that one of"),
    "32 tokens": _tale("noticed that one of them"),
    "33 tokens": _tale("noticed that one of them had"),
    "63 tokens": _tale("every one of them"),
    "64 tokens": _tale("every one of them told"),
    "65 tokens": _tale("every one of them told a"),
    "about 130 tokens": TALE,
    "shared prefix, other end": _tale("every one of them") + " laughed and said",
    "emoji": "Translate the emoji into words: 🙂 🚀 🌧️ 👩‍👩‍👧 =",
    "CJK": "東京は日本の首都です。北京是中国的首都。서울은",
    "accents": "Où est la bibliothèque ? Größe, naïveté, mañana, Łódź, Ångström:",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "digits": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    "chat": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "chat, system": (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
    ),
}
