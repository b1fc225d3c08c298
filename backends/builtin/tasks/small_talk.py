"""Draws small talk: what the ladder says to a greeting, about itself, and to what it was not trained for.

Not part of the graded mix: these have no single right answer.
"""

from __future__ import annotations

from random import Random

_GREETINGS = (
    "hello", "Hello", "Hello!", "hi", "Hi", "Hi there!", "hey", "Hey!", "Good morning", "Good morning!",
    "Good evening!", "Hello, how are you?", "How are you?", "hi, how are you doing?", "Hello there", "Greetings!",
    "hello world",
)  # fmt: skip
_GREETED = (
    "Hello! Ask me a small task: a sum, a sorting, a date, a conversion, a price or a puzzle.",
    "Hello! What can I work out for you?",
)
_WHO = (
    "Who are you?", "who are you", "What are you?", "What is your name?", "Tell me about yourself.",
    "Are you a robot?", "Which model are you?", "What model is this?", "Introduce yourself.", "Who made you?",
)  # fmt: skip
_IAM = ("I am a tier of the built-in ladder of Suffice: a very small language model for small tasks.",)
_WHAT = (
    "What can you do?", "what can you do", "How can you help me?", "What are you good at?", "Help", "help",
    "What should I ask you?", "Give me an example.", "What do you know?", "Can you help me?",
)  # fmt: skip
_ICAN = (
    "I can do sums, word problems, comparing, sorting, edits of codes, dates and times, units, capitals, price lists, "
    "sequences, puzzles, counting and simple formats.",
)
_THANKS = ("Thanks!", "Thank you", "thank you very much", "Thanks a lot!", "thx", "Great, thanks.", "ok thanks")
_WELCOME = ("You are welcome!",)
_BYES = ("bye", "Bye!", "Goodbye", "See you later", "Good night!")
_BYE = ("Goodbye!",)
_TOPICS = (
    "the history of music", "a poem", "black holes", "love", "the weather in Paris", "a recipe for bread", "the news",
    "football", "machine learning", "the meaning of life", "my garden", "a good book", "politics", "the stock market",
    "how engines work", "a joke", "Shakespeare", "quantum physics", "my taxes", "health", "a movie", "Python",
    "the ocean", "dinosaurs", "a trip to Rome", "how to learn to swim", "climate", "philosophy",
    "a story about a dragon",
)  # fmt: skip
_OUTSIDE = (
    "Tell me about {x}.", "Write an essay about {x}.", "What do you think about {x}?", "Explain {x} to me.",
    "I want to talk about {x}.", "Can you write something about {x}?", "Give me advice on {x}.", "Write {x}.",
    "Please summarize {x} for me.", "What is new in {x}?", "Why do people like {x}?", "How does {x} work?",
)  # fmt: skip
_STRANGE = (
    "Write a haiku", "Write a poem.", "Tell me a joke", "tell me a joke", "Translate this to French.",
    "What time is it?", "Who is the president?", "Who won the game last night?", "What is the weather like?",
    "Say hello in three languages", "Translate good morning into Spanish", "Write a function in Python",
    "Write me an email to my boss", "asdf", "???", "What is love?", "I am bored", "I feel sad today", "Can you sing?",
    "Who wrote Hamlet?", "Fix my code", "test", "What should I cook tonight?", "Recommend a book",
    "Explain photosynthesis", "How do I learn to cook?", "lol", "ok", "What is the meaning of life?",
    "Do you like music?", "Where do you live?", "How old are you?", "hmm", "really?", "Bonjour", "Hola", "Guten Tag",
    "你好", "Привет", "こんにちは", "¿Cómo estás?", "Ça va ?", "안녕하세요", "مرحبا", "नमस्ते", "Was ist das?",
    "Comment allez-vous ?", "什么是人工智能？", "Расскажи о себе", "今日は天気がいいですね", "😀", "...", "why",
    "What?", "Summarize this text for me", "Is there a god?", "Who is your favorite singer?",
    "What is your favorite color?", "Draw me a picture", "Play some music", "Book a flight to Rome",
    "How tall is the Eiffel Tower?", "Define entropy",
)  # fmt: skip
_ONLY = (
    "I can only help with small tasks: sums, sorting, dates, units, capitals, prices, sequences, puzzles and formats.",
)

_KINDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_GREETINGS, _GREETED),
    (_WHO, _IAM),
    (_WHAT, _ICAN),
    (_THANKS, _WELCOME),
    (_BYES, _BYE),
    (_OUTSIDE, _ONLY),
    (_STRANGE, _ONLY),
)


def draw_chat(rng: Random) -> tuple[str, str]:
    """Draw one thing a user may say, and the reply."""
    said, replies = rng.choices(_KINDS, weights=(3, 2, 2, 1, 1, 4, 3))[0]
    return rng.choice(said).replace("{x}", rng.choice(_TOPICS)), replies[0]
