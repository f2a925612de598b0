"""Every known format, and rows as published sets have them, worked out by hand; what fits none is told what would."""

from __future__ import annotations

import json

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.schema import Example, detect, format_of, read_row
from tests.factories.chats import a, u


def reading(row: dict) -> Example:
    return read_row(row, format_of([row], "rows"), "rows row 1")


CHAT = [u("Hi"), a("Hello"), u("Bye"), a("Ciao")]


@pytest.mark.parametrize("row", [
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"},
                       {"from": "human", "value": "Bye"}, {"from": "gpt", "value": "Ciao"}]},
    {"messages": [u([{"type": "text", "text": "Hi"}]), *CHAT[1:]]},
    {"messages": [{**m, "name": None} for m in CHAT]},
])
def test_a_conversation_is_read_whole_and_prompts_up_to_its_last_answer(row):
    example = reading(row)
    assert (example.messages, example.prompt) == (CHAT, CHAT[:3])


def test_ranked_rows_keep_every_answer_with_its_score_also_from_a_csv():
    want = [("x", 0.5), ("y", 2.0), ("z", 0.5)]
    assert reading({"prompt": "p", "completions": ["x", "y", "z"], "scores": [0.5, 2, 0.5]}).answers == want
    assert reading({"prompt": "p", "completions": '["x", "y", "z"]', "scores": "[0.5, 2, 0.5]"}).answers == want


def test_prompts_and_texts_are_read_and_other_columns_are_handed_on():
    assert reading({"text": "Once."}).text == "Once."
    assert reading({"question": "q", "answer": "42", "level": 3}).columns == {"answer": "42", "level": 3}
    assert reading({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "0.5"}).margin == 0.5


def test_two_texts_that_begin_differently_are_a_pair_without_a_prompt():
    example = reading({"chosen": "a fine film", "rejected": "dull"})
    assert example.prompt == "" and example.answers == [("a fine film", 1.0), ("dull", 0.0)]


@pytest.mark.parametrize(("row", "reason"), [
    ({"prompt": "p", "chosen": "same", "rejected": "same"}, "the two answers are the same"),
    ({"chosen": "same text", "rejected": "same text"}, "the two answers are the same"),
    ({"chosen": [u("p"), a("x")], "rejected": [u("q"), a("x")]}, "the two conversations do not part at an answer"),
    ({"chosen": [a("x")], "rejected": [a("y")]}, "the two conversations share no prompt"),
    ({"prompt": None}, "no prompt"),
    ({"messages": []}, "empty messages"),
    ({"prompt": "p", "completions": [], "scores": []}, "no completions"),
])
def test_a_row_without_meaning_is_refused_with_its_reason(row, reason):
    with pytest.raises(SkipRow) as refused:
        reading(row)
    assert str(refused.value) == reason


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": 3}, "rows row 1: prompt must be a string or a list of messages, not int"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "row 1: messages: unknown role 'robot'; there are human, "),
    ({"prompt": "p", "completions": ["x"], "scores": [1, 2]}, "1 completions but 2 scores"),
    ({"prompt": "p", "completion": "c", "label": "maybe"}, "label must be true or false, not 'maybe'"),
    ({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "big"}, "margin must be a number, not 'big'"),
])
def test_a_value_of_the_wrong_type_is_a_user_error_with_its_row(row, said):
    with pytest.raises(UserError) as error:
        reading(row)
    assert said in str(error.value)


def test_a_later_row_that_lacks_a_column_is_a_user_error_with_its_row():
    with pytest.raises(UserError, match="rows row 9: column completion is missing"):
        read_row({"prompt": "p"}, detect(["prompt", "completion"], "rows"), "rows row 9")


def test_unknown_columns_are_told_what_would_fit():
    with pytest.raises(UserError) as error:
        detect(["query", "reply\n"], "my.jsonl")
    message = str(error.value)
    assert message.startswith("my.jsonl: columns query, 'reply\\n' fit no known format; what would fit: ")
    for fitting in ("prompt+chosen+rejected", "chosen+rejected", "prompt+completion", "messages"):
        assert fitting in message
    assert message.endswith("""name yours: --data.sources "{path: my.jsonl, columns: {prompt: query, completion: """
                            """'reply\\n'}}\"""")
    assert "\n" not in message


def test_lone_surrogates_that_no_tokenizer_can_read_are_replaced():
    assert reading({"text": "a\ud800b\ud83d\ude00"}).text == "a\ufffdb\U0001f600"


def test_prompt_and_response_are_a_demonstration_and_with_a_label_an_answer_good_or_bad() -> None:
    from hybrid_rlhf.data.schema import detect, read_row

    row = {"prompt": "2 + 2?", "response": "4", "level": 1}
    form = detect(row, "x")
    example = read_row(row, form, "x")
    assert (form.kind, example.answers) == ("demonstration", [("4", 1.0)])
    assert example.columns == {"response": "4", "level": 1}  # handed on to reward functions
    bad = row | {"label": "no"}
    assert (detect(bad, "x").kind, read_row(bad, detect(bad, "x"), "x").answers) == ("unpaired", [("4", 0.0)])


# -- Rows as published data sets have them: each is read as worked out by hand, or refused by a rule -------------------


def s(text: str) -> dict:
    return {"role": "system", "content": text}


def human(text: str) -> dict:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict:
    return {"from": "gpt", "value": text}


HH = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant:"
# name: (row, prompt, answers with their scores (None: a conversation, [] of a prompt), columns that nothing reads)
ANSWERED = {
    "LLaMA-Factory alpaca": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["Hi", "Yo"]]},
        [s("Be brief."), u("Hi"), a("Yo"), u("Add.\n\n1 2")], [([a("3")], 1)], ()),
    "LLaMA-Factory sharegpt pairs": (
        {"conversations": [human("Hi"), gpt("Yo"), human("Why?")], "chosen": gpt("So."), "rejected": gpt("No."),
         "system": "Be brief."},
        [s("Be brief."), u("Hi"), a("Yo"), u("Why?")], [([a("So.")], 1), ([a("No.")], 0)], ()),
    "databricks/databricks-dolly-15k": (
        {"instruction": "When did it begin?", "context": "It began in 1910.", "response": "1910.",
         "category": "closed_qa"},
        [u("When did it begin?\n\nIt began in 1910.")], [([a("1910.")], 1)], ("category",)),
    "rajpurkar/squad": (
        {"id": "57", "title": "Plums", "context": "A plum is purple.", "question": "What colour is it?",
         "answers": {"text": ["purple", "purple."], "answer_start": [10, 10]}},
        [u("A plum is purple.\n\nWhat colour is it?")], [([a("purple")], 1)], ("id", "title")),
    "Open-Orca/OpenOrca": (
        {"id": "flan.1", "system_prompt": "You are terse.", "question": "2+2?", "response": "4"},
        [s("You are terse."), u("2+2?")], [([a("4")], 1)], ("id",)),
    "argilla/distilabel-intel-orca-dpo-pairs": (
        {"system": "", "input": "2+2?", "chosen": "4", "rejected": "5", "generations": ["4", "5"], "order": ["A", "B"],
         "labelling_model": "gpt", "labelling_prompt": [u("Rate.")], "raw_labelling_response": "9",
         "rating": [9.0, 1.0], "rationale": "Only one is right.", "status": "tie", "original_chosen": "4",
         "original_rejected": "5", "chosen_score": 9.0, "in_gsm8k_train": False},
        [u("2+2?")], [([a("4")], 1), ([a("5")], 0)],
        ("generations", "order", "labelling_model", "labelling_prompt", "raw_labelling_response", "rationale",
         "status")),
    "openbmb/UltraFeedback": (
        {"source": "evol", "instruction": "Name one.", "models": ["m", "n"], "correct_answers": ["None"],
         "incorrect_answers": ["None"],
         "completions": [{"model": "mistral-7b", "principle": "p", "custom_system_prompt": "c", "response": "A plum.",
                          "critique": "c", "overall_score": 9.0, "fine-grained_score": 3.5},
                         {"model": "llama-2-7b", "principle": "p", "custom_system_prompt": "c", "response": "A fig.",
                          "critique": "c", "overall_score": 7.0, "fine-grained_score": 4.5}]},
        [u("Name one.")], [([a("A plum.")], 3.5), ([a("A fig.")], 4.5)],
        ("source", "models", "correct_answers", "incorrect_answers")),
    "distilabel, texts rated": (
        {"input": "Name one.", "generations": ["A plum.", "No."], "ratings": [5.0, 1.0], "rationales": ["r", "q"]},
        [u("Name one.")], [([a("A plum.")], 5), ([a("No.")], 1)], ("rationales",)),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        {"id": "1", "source": "ai2", "prompt": "Hi", "chosen": [u("Hi"), a("Yo")], "rejected": [u("Hi"), a("No")],
         "chosen_model": "mistral-7b", "rejected_model": "llama-2-7b", "chosen_rating": 5.0, "rejected_rating": 1.0},
        [u("Hi")], [([a("Yo")], 1), ([a("No")], 0)], ("id", "source", "chosen_model", "rejected_model")),
    "allenai/RLVR-GSM": (
        {"messages": [u("2+2?")], "ground_truth": "4", "dataset": "gsm8k"}, [u("2+2?")], None,
        ("ground_truth", "dataset")),
    "teknium/OpenHermes-2.5": (
        {"conversations": [{**human("Hi"), "weight": None}, {**gpt("Yo"), "weight": None}],
         "system_prompt": "Be brief.", "source": "airoboros", "category": None, "skip_prompt_formatting": False},
        [s("Be brief."), u("Hi")], None, ("source",)),
    "nvidia/HelpSteer2": (
        {"prompt": "Hi", "response": "Yo", "helpfulness": 4, "correctness": 4, "coherence": 4, "complexity": 1,
         "verbosity": 1}, "Hi", [("Yo", 1)], ()),
    "nvidia/HelpSteer2, preference": (
        {"split": "train", "prompt": "Hi", "response_1": "Yo", "response_2": "No", "preference_strength": 2,
         "preference_statement": "Response 2 is better", "preference_elaboration": "e"},
        "Hi", [("No", 1), ("Yo", 0)], ("split", "preference_statement", "preference_elaboration")),
    "nvidia/HelpSteer3": (
        {"domain": "stem", "language": "english", "context": [u("Hi"), a("Yes?"), u("Why?")], "response1": "So.",
         "response2": "No.", "overall_preference": -3, "individual_preference": [{"score": -3, "reasoning": "r"}]},
        [u("Hi"), a("Yes?"), u("Why?")], [([a("So.")], 1), ([a("No.")], 0)],
        ("domain", "language", "individual_preference")),
    "Anthropic/hh-rlhf": (
        {"chosen": HH + " Because.", "rejected": HH + " No."}, [u("Hi"), a("Yes?"), u("Why?")],
        [([a("Because.")], 1), ([a("No.")], 0)], ()),
    "Dahoas/full-hh-rlhf": (
        {"prompt": HH, "response": " Because.", "chosen": " Because.", "rejected": " No."},
        [u("Hi"), a("Yes?"), u("Why?")], [("Because.", 1), ("No.", 0)], ()),
    "HH, a prompt": ({"prompt": HH}, [u("Hi"), a("Yes?"), u("Why?")], [], ()),
    "StackExchange": (
        {"question": "q", "response_j": "better", "response_k": "worse", "qid": 7},
        [u("q")], [([a("better")], 1), ([a("worse")], 0)], ()),
    "LLMBar": ({"input": "q", "output_1": "one", "output_2": "two", "label": 2}, [u("q")],
               [([a("two")], 1), ([a("one")], 0)], ()),
    "GPTeacher": ({"instruction": "Be.", "input": None, "response": "ok"}, [u("Be.")], [([a("ok")], 1)], ()),
    "stanfordnlp/SHP": (
        {"post_id": "p", "domain": "askbaking_train", "history": "Why flour?", "human_ref_A": "No.",
         "human_ref_B": "It binds.", "labels": 0, "score_A": 2, "score_B": 9},
        [u("Why flour?")], [([a("It binds.")], 1), ([a("No.")], 0)], ("post_id", "domain")),
    "berkeley-nest/Nectar": (
        {"prompt": "\n\nHuman: Hi\n\nAssistant: ", "turns": 1, "num_responses": 2, "source": ["sharegpt"],
         "good_natured": True,
         "answers": [{"answer": "No", "model": "mistral-7b", "rank": 2.0},
                     {"answer": "Yo", "model": "llama-2-7b", "rank": 1.0}]},
        [u("Hi")], [("No", -2), ("Yo", -1)], ("source",)),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": (
        {"id": "x", "conversations": [human("Hi"), gpt("Yo"), human("Bye"), gpt("Ciao")]},
        [u("Hi"), a("Yo"), u("Bye")], None, ("id",)),
    "Magpie-Align/Magpie-Pro-300K-Filtered": (
        {"uuid": "1", "model": "mistral-7b", "gen_input_configs": {"temperature": 1.0, "input_generator": "g"},
         "instruction": "Hi",
         "response": "Yo", "conversations": [human("Hi"), gpt("Yo")], "task_category": "chat", "difficulty": "easy"},
        [u("Hi")], [([a("Yo")], 1)],
        ("uuid", "model", "gen_input_configs", "conversations", "task_category", "difficulty")),
    "AI-MO/NuminaMath-CoT": (
        {"source": "aops", "problem": "2+2?", "solution": "It is 4.", "messages": [u("2+2?"), a("It is 4.")]},
        [u("2+2?")], None, ("source",)),  # the solution is in the messages
    "openai/gsm8k": ({"question": "2+2?", "answer": "It is 4.\n#### 4"}, [u("2+2?")], [([a("It is 4.\n#### 4")], 1)],
        ()),
    "LDJnr/Capybara": (
        {"source": "airoboros", "conversation": [{"input": "Hi", "output": "Yo"}, {"input": "Bye", "output": "Ciao"}]},
        [u("Hi"), a("Yo"), u("Bye")], None, ("source",)),
    "OpenAssistant/oasst1": (  # a message a row, of a tree that only other rows complete
        {"message_id": "1", "parent_id": "0", "text": "Hi", "role": "prompter", "lang": "en"}, None, "Hi",
        ("message_id", "parent_id", "role", "lang")),
    "TRL prompt only": ({"prompt": "Hi"}, "Hi", [], ()),
    "TRL prompt only, conversational": ({"prompt": [u("Hi")]}, [u("Hi")], [], ()),
    "TRL prompt and completion": ({"prompt": "The sky is", "completion": " blue."}, "The sky is", [(" blue.", 1)], ()),
    "TRL prompt and completion, conversational": (
        {"prompt": [u("Hi")], "completion": [a("Yo")]}, [u("Hi")], [([a("Yo")], 1)], ()),
    "TRL preference": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "The sky is",
                       [(" blue.", 1), (" green.", 0)], ()),
    "TRL preference, conversational": (
        {"prompt": [u("Hi")], "chosen": [a("Yo")], "rejected": [a("No")]}, [u("Hi")], [([a("Yo")], 1), ([a("No")], 0)],
        ()),
    "TRL preference, implicit prompt": ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "The sky is",
                                        [(" blue.", 1), (" green.", 0)], ()),
    "TRL preference, implicit prompt, conversational": (
        {"chosen": [u("Hi"), a("Yo")], "rejected": [u("Hi"), a("No")]}, [u("Hi")], [([a("Yo")], 1), ([a("No")], 0)],
         ()),
    "TRL unpaired": ({"prompt": "The sky is", "completion": " blue.", "label": True}, "The sky is", [(" blue.", 1)],
        ()),
    "TRL stepwise supervision": (  # its steps are not answers: the prompts are read
        {"prompt": "2+2?", "completions": ["Two and two.", "4"], "labels": [True, True]}, "2+2?", [], ("completions",)),
    "TRL language modelling": ({"text": "The sky."}, None, "The sky.", ()),
    "SQuAD 2 without answer": (
        {"context": "c", "question": "q", "answers": {"text": [], "answer_start": []}}, [u("c\n\nq")], [], ()),
    "stanfordnlp/web_questions": ({"url": "w", "question": "Who?", "answers": ["Ann", "Bo"]}, [u("Who?")],
                                  [([a("Ann")], 1)], ("url",)),
    "google-research-datasets/nq_open": ({"question": "Who?", "answer": ["Ann"]}, [u("Who?")], [([a("Ann")], 1)], ()),
    "one answer, of none": ({"question": "Who?", "answer": None}, [u("Who?")], [], ()),
    "a prompt before what both conversations share": (
        {"prompt": [u("Hi"), a("Yes?")], "chosen": [u("Why?"), a("So.")], "rejected": [u("Why?"), a("No.")]},
        [u("Hi"), a("Yes?"), u("Why?")], [([a("So.")], 1), ([a("No.")], 0)], ()),
    "a prompt that overlaps with what they share": (
        {"prompt": [s("S"), u("Hi")], "chosen": [u("Hi"), a("Yes?"), u("Why?"), a("So.")],
         "rejected": [u("Hi"), a("Yes?"), u("Why?"), a("No.")]},
        [s("S"), u("Hi"), a("Yes?"), u("Why?")], [([a("So.")], 1), ([a("No.")], 0)], ()),
    "an answer that is one message of a user as JSON": (
        {"prompt": "A message as JSON.", "completion": '{"role": "user", "content": "hi"}'}, "A message as JSON.",
        [('{"role": "user", "content": "hi"}', 1)], ()),
    "an answer that begins as Python prints messages": (
        {"prompt": "What is it?", "completion": "[{'role': 'x'}] is a list of dicts"}, "What is it?",
        [("[{'role': 'x'}] is a list of dicts", 1)], ()),
    "a prompt that begins so": ({"prompt": "[{'role': 'x'}] is what?"}, "[{'role': 'x'}] is what?", [], ()),
    "no pictures": ({"prompt": "Hi", "images": [], "image": {"bytes": None, "path": None}, "audio": "none",
                     "videos": [None, ""]}, "Hi", [], ("audio",)),
    "a table that holds messages as JSON": (
        {"prompt": json.dumps([s("S"), u("Hi")]), "chosen": json.dumps([a("Yo")]), "rejected": json.dumps([gpt("No")])},
        [s("S"), u("Hi")], [([a("Yo")], 1), ([a("No")], 0)], ()),
    "JSON that is an answer": (
        {"prompt": "Two plums as JSON.", "completion": '[{"name": "plum"}, {"name": "plum"}]'}, "Two plums as JSON.",
        [('[{"name": "plum"}, {"name": "plum"}]', 1)], ()),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_a_published_row_is_read_as_worked_out_by_hand(name):
    row, prompt, answers, unread = ANSWERED[name]
    example = reading(row)
    assert example.prompt == prompt and example.unread == unread
    if answers is None:
        assert [m["content"] for m in example.messages[: len(prompt)]] == [m["content"] for m in prompt]
    elif isinstance(answers, str):
        assert example.text == answers
    else:
        assert example.answers == answers and example.messages is None


REFUSED = {
    "pictures under another name": ({"prompt": "What?", "image_paths": ["plum.png"]}, "images, video or audio"),
    "a part of a video": ({"prompt": [u([{"type": "video", "video": "x"}])], "answer": "A plum."},
         "parts that are not text"),
    "images of a message": ({"messages": [{**u("What?"), "images": ["x"]}, a("A plum.")]}, "images, video or audio"),
    "sounds": ({"prompt": "What?", "audio": {"array": [0.0]}}, "images, video or audio"),
    "half repeated": ({"prompt": [u("Hi")], "chosen": [u("Hi"), a("Yo")], "rejected": [a("No")]}, "the other does not"),
    "HelpSteer3, a tie": ({"context": [u("q")], "response1": "x", "response2": "y", "overall_preference": 0}, "same"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_cannot_be_read_is_dropped_with_its_reason(name):
    row, reason = REFUSED[name]
    with pytest.raises(SkipRow, match=reason):
        reading(row)


@pytest.mark.parametrize(("row", "message"), [
    ({"chosen": "Purple.", "rejected": "Green.", "user_prompt": "What is it?"}, "beside the column user_prompt; "),
    ({"chosen": "Purple.", "rejected": "Green.", "Question": "What is it?"}, "beside the column Question; name it "),
    ({"prompt": "p", "chosen": "[{'role': 'assistant', 'content': 'x'}]", "rejected": "x"},
     "holds messages as Python prints them"),
    ({"messages": [u("Hi"), {**a("Yo"), "weight": 0.5}]}, "weight of a message must be 0 or 1 .*not 0.5"),
])
def test_a_row_that_would_be_read_wrongly_is_one_line(row, message):
    with pytest.raises(UserError, match=f"^rows( row 1)?: .*{message}") as error:
        reading(row)
    assert "\n" not in str(error.value)
