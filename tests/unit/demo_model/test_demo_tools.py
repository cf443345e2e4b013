"""The choice of tools: rules, examples, arguments. The embedding model is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.demo_model.rules import Call, filled, follow_up, names
from services.demo_model.tools import ExampleIndex, choose, described_phrasings, shipped_examples
from services.demo_model.wheels import embedding_file
from shared.llm.minilm import Embedder

pytestmark = pytest.mark.model


def tool(name: str, description: str = "A tool.", **properties: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in properties.items()},
            "required": list(properties),
        },
    }


ALL = [
    tool("web_search", query="string"),
    tool("web_fetch", url="string"),
    tool("search_memory", query="string"),
    tool("save_memory", content="string"),
    tool("save_topic", topic="string", content="string"),
    tool("recall_topic", topic="string"),
    tool("search_knowledge_graph", people="array", locations="array"),
    tool("search_documents", query="string"),
    tool("current_time"),
]

# None of these texts is among the examples, and none of the examples is a variation of one of them.
HELD_OUT = [
    ("Which planet is closest to the sun?", "answer"),
    ("Who discovered penicillin?", "answer"),
    ("How many bones does an adult human have?", "answer"),
    ("What is the difference between a virus and a bacterium?", "answer"),
    ("Can you write a limerick about a snail?", "answer"),
    ("What is 12 times 12?", "answer"),
    ("How do I reverse a linked list in C?", "answer"),
    ("Explain async and await to a beginner.", "answer"),
    ("Good evening!", "answer"),
    ("What does the Latin phrase carpe diem mean?", "answer"),
    ("In which year did the Titanic sink?", "answer"),
    ("Why do cats purr?", "answer"),
    ("How long should I boil an egg?", "answer"),
    ("And who invented it?", "answer"),
    ("Give me a packing list for a camping trip.", "answer"),
    ("What are the rules of chess?", "answer"),
    ("Translate 'where is the station' to Italian.", "answer"),
    ("What's the weather like in Madrid this afternoon?", "web_search"),
    ("How is the DAX doing today?", "web_search"),
    ("Who is the reigning chess world champion?", "web_search"),
    ("Any news about the Mars rover?", "web_search"),
    ("What does a litre of milk cost in Switzerland nowadays?", "web_search"),
    ("Search the internet for quiet mechanical keyboards.", "web_search"),
    ("Which version of Postgres is the newest?", "web_search"),
    ("When is the next total lunar eclipse visible in Europe?", "web_search"),
    ("Did Arsenal win yesterday?", "web_search"),
    ("Please look up reviews of the Framework laptop.", "web_search"),
    ("What happened at the climate summit this week?", "web_search"),
    ("Has the Starship test flight taken place yet?", "web_search"),
    ("How many followers does NASA have on Instagram at present?", "web_search"),
    ("Read https://docs.python.org/3/whatsnew/ and tell me what is new.", "web_fetch"),
    ("Fetch and summarize the content at http://127.0.0.1:8000/page.", "web_fetch"),
    ("What does https://example.org/article say about bees?", "web_fetch"),
    ("Open example.net/news for me", "web_fetch"),
    ("What did I say about the garden fence?", "search_memory"),
    ("Which newspaper do I read?", "search_memory"),
    ("Do you still know what my sister is called?", "search_memory"),
    ("What did we agree on for the logo?", "search_memory"),
    ("What do you remember about Canadian history?", "search_memory"),
    ("how do I like my eggs?", "search_memory"),
    ("Am I left-handed?", "search_memory"),
    ("Which holiday destination did I mention?", "search_memory"),
    ("Please remember that the plumber comes on Thursday.", "save_memory"),
    ("Don't forget that the key is with the caretaker.", "save_memory"),
    ("Make a note: the invoice was paid.", "save_memory"),
    ("Please remember my favourite band is Nirvana.", "save_memory"),
    ("Remember that I prefer window seats.", "save_memory"),
    ("Note that my wife's birthday is in May.", "save_memory"),
    ("Keep in mind that I am a night owl.", "save_memory"),
    ("From now on, reply in Spanish.", "save_memory"),
    ("What is stored under user.preferred_language?", "recall_topic"),
    ("Who is Julia's father?", "search_knowledge_graph"),
    ("Where did Markus live before Prague?", "search_knowledge_graph"),
    ("Is Sophie related to Daniel?", "search_knowledge_graph"),
    ("Who works together with Nina?", "search_knowledge_graph"),
    ("What time is it where I am?", "current_time"),
    ("Can you check the clock for me?", "current_time"),
    ("What is the time of day in Auckland?", "current_time"),
]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder(embedding_file())


@pytest.fixture(scope="module")
def index(embedder: Embedder) -> Iterator[ExampleIndex]:
    return ExampleIndex(lambda texts: embedder.embed(texts)[0], shipped_examples())


def test_most_phrasings_that_were_never_seen_get_the_right_tool(index: ExampleIndex) -> None:
    known = {example.text.lower() for example in shipped_examples()}
    wrong: list[str] = []
    for text, expected in HELD_OUT:
        assert text.lower() not in known
        call = choose(text, ALL, index)
        got = call.name if call else "answer"
        if got != expected:
            wrong.append(f"{text} → {got}, not {expected}")
    right = len(HELD_OUT) - len(wrong)
    # 50 of 58 on x86-64; the floor leaves room for another build of the embedding model's runtime.
    print(f"\n{right} of {len(HELD_OUT)} right ({right / len(HELD_OUT):.0%})", *wrong, sep="\n  ")
    assert right / len(HELD_OUT) >= 0.8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is the capital of France?", None),
        ("Tell me about the Python GIL.", None),
        ("Why was it introduced?", None),
        ("What is the boiling point of water at sea level?", None),
        ("What major AI news broke this week?", "web_search"),
        ("What is the current price of Bitcoin in USD?", "web_search"),
        ("Summarize the content of the top result for: LoCAL2 Gemma tool calling", "web_search"),
        ("Fetch and summarize the content at http://127.0.0.1:9/x", "web_fetch"),
        ("What do you remember about Australian geography?", "search_memory"),
        ("how do I like my coffee?", "search_memory"),
        ("What language do I prefer?", "search_memory"),
        ("Please remember my preferred language is Elixir.", "save_memory"),
        ("The capital of Australia is Canberra, not Sydney.", None),
        ("I like my coffee black, without sugar.", None),
        ("My sister Anna lives in Lyon.", None),
        ("Anna moved to Porto in May.", None),
        ("Where did Anna live before?", "search_knowledge_graph"),
        ("What time is it?", "current_time"),
    ],
)
def test_the_questions_of_the_acceptance_stories_get_their_tool(
    index: ExampleIndex, text: str, expected: str | None
) -> None:
    call = choose(text, ALL, index)
    assert (call.name if call else None) == expected


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("what time is it?", Call("current_time", {})),
        ("What's the current time?", Call("current_time", {})),
        ("Please tell me what day it is... what date is it?", Call("current_time", {})),
        ("Which day is today?", Call("current_time", {})),
        ("What time is it in New York right now?", Call("current_time", {"zone": "America/New_York"})),
        ("What time is it in Bavaria?", Call("current_time", {"zone": "Bavaria"})),
        ("What is the time complexity of heapsort?", None),
        ("What major AI news broke this week?", Call("web_search", {"query": "What major AI news broke this week?"})),
        ("Open example.net/news, please", Call("web_fetch", {"url": "https://example.net/news"})),
        ("Look at (https://a.example/b?c=d&e=1).", Call("web_fetch", {"url": "https://a.example/b?c=d&e=1"})),
        (
            "Please remember my preferred language is Elixir.",
            Call("save_memory", {"content": "Please remember my preferred language is Elixir."}),
        ),
        ("Show me user.coffee_order", Call("recall_topic", {"topic": "user.coffee_order"})),
        (
            "How are Anna and Peter from Graz related?",
            Call("search_knowledge_graph", {"people": ["Anna", "Peter", "Graz"]}),
        ),
        (
            "What does my coffee manual say about descaling?",
            Call("search_documents", {"query": "What does my coffee manual say about descaling?"}),
        ),
        (
            "Find the clause on notice in our contract.",
            Call("search_documents", {"query": "Find the clause on notice in our contract."}),
        ),
    ],
)
def test_the_arguments_are_taken_from_the_text(index: ExampleIndex, text: str, call: Call) -> None:
    assert choose(text, ALL, index) == call


def test_only_tools_that_are_offered_are_called(index: ExampleIndex) -> None:
    fetch_only = [tool("web_fetch", url="string")]
    assert choose("What major AI news broke this week?", fetch_only, index) is None
    assert choose("Read https://a.example/b", [tool("web_search", query="string")], index) != Call(
        "web_fetch", {"url": "https://a.example/b"}
    )
    assert choose("What major AI news broke this week?", [], index) is None


def test_a_tool_without_examples_is_called_by_the_phrasings_in_its_description(index: ExampleIndex) -> None:
    dice = tool("roll_dice", 'Rolls dice. Call it for "roll two dice", "throw a die" or "flip a coin".', text="string")
    assert choose("Please roll three dice for me", [*ALL, dice], index) == Call(
        "roll_dice", {"text": "Please roll three dice for me"}
    )
    assert choose("What is the capital of France?", [*ALL, dice], index) is None
    assert described_phrasings("Rolls dice. Use it for games.") == ["Rolls dice.", "Use it for games."]


def test_a_tool_whose_arguments_cannot_be_filled_is_never_called(index: ExampleIndex) -> None:
    pair = tool("add_numbers", 'Adds. Call it for "add two numbers".', left="number", right="number")
    assert choose("add two numbers", [pair], index) is None


@pytest.mark.parametrize("text", ["", "   ", "?", "ß" * 5000, "'; DROP TABLE x", "[SEP] [CLS]", "\x00\n"])
def test_odd_texts_are_answered_or_called_without_an_error(index: ExampleIndex, text: str) -> None:
    call = choose(text, ALL, index)
    assert call is None or call.args


SEARCHED = "Today's date: 2026-05-30\n\n[1] Title: A\n    Snippet: B\n    URL: https://a.example/1\n"


def test_the_top_result_is_fetched_after_the_search_and_only_once() -> None:
    question = "Summarize the content of the top result for: bees"
    fetch = Call("web_fetch", {"url": "https://a.example/1"})
    assert follow_up(question, [("web_search", SEARCHED)], ALL) == fetch
    assert follow_up(question, [("web_search", SEARCHED), ("web_fetch", "URL: …")], ALL) is None
    assert follow_up(question, [("web_search", "No results found for: bees")], ALL) is None
    assert follow_up("What is new about bees?", [("web_search", SEARCHED)], ALL) is None
    assert follow_up(question, [("web_search", SEARCHED)], [tool("web_search", query="string")]) is None


def test_names_are_capitalised_words_but_not_question_words() -> None:
    assert names("Who is Alice Weber married to in New York?") == ["Alice Weber", "New York"]
    assert names("Is Tom married to Peter?") == ["Tom", "Peter"]
    assert names("anyone at all") == []


def test_argument_from_long_text_is_cut() -> None:
    assert filled("web_search", "word " * 500, tool("web_search", query="string")) == Call(
        "web_search", {"query": ("word " * 500)[:200]}
    )
