"""The GSM8K rewards, which read a marked number, or any last number unless strict."""

import json
import os
from pathlib import Path

import pytest

from megarl.rewards.gsm8k import gsm8k, gsm8k_strict
from megarl.types import Prompt, Rollout, Turn

pytestmark = pytest.mark.alone


def rollout(answer, ground_truth):
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": answer})
    return Rollout(Prompt(id="x", messages=(), ground_truth=ground_truth), (Turn((1,)),), messages=messages)


@pytest.mark.parametrize("ground_truth", ["72", 72, 72.0, "72.0", "$72"])
@pytest.mark.parametrize(
    "answer",
    [
        "#### 72",
        "so 70 + 2 = 72\n####72.",
        "#### $72.00",
        "#### **72**",
        "#### 72 apples of 100",
        "first #### 5, no: #### 72",
        r"\boxed{72}",
        r"it is $\boxed{\$72}$, of 100",
        r"\boxed{x = 72\text{ cm}^2}",
        r"\boxed{5}, wrong; #### 72",
        r"#### 5 is wrong, it is \boxed{72}",
    ],
)
def test_rewards_marked_numbers(answer, ground_truth):
    assert gsm8k(rollout(answer, ground_truth)) == 1.0
    assert gsm8k_strict(rollout(answer, ground_truth)) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["The answer is 72.", "8 * 9 = 72", "72", "The answer is $72.00.", "**72**", "#### is the mark, and 72 the answer"],
)
def test_rewards_unmarked_numbers_unless_strict(answer):
    assert gsm8k(rollout(answer, "72")) == 1.0
    assert gsm8k_strict(rollout(answer.replace("####", ""), "72")) == 0.0


@pytest.mark.parametrize(
    "answer",
    ["", "#### 73", "#### 720", "#### 7.2", "#### -72", "72 #### 73", "72 or 73", "#### 7 2", r"72 \boxed{73}"],
)
def test_gives_nothing_for_other_answers(answer):
    assert gsm8k(rollout(answer, "72")) == 0.0
    assert gsm8k_strict(rollout(answer, "72")) == 0.0


@pytest.mark.parametrize(
    "answer, ground_truth",
    [("#### 9,200,000", "9200000"), ("#### 9200000", "9,200,000"), ("#### -7", "-7"), (r"\boxed{1{,}080}", 1080)],
)
def test_reads_commas_and_signs(answer, ground_truth):
    assert gsm8k(rollout(answer, ground_truth)) == 1.0


def test_refuses_ground_truths_that_are_no_number():
    assert gsm8k(Rollout(Prompt(id="x", messages=(), ground_truth="1"), (Turn((1,)),))) == 0.0
    with pytest.raises(ValueError, match="ground truth 'many' is not a number"):
        gsm8k(rollout("#### 1", "many"))


GOLD_ANSWERS = [
    "He had 48/2 = <<48/2=24>>24 left.\n#### 24",
    "5 x 2 = $<<5*2=10>>10.\nShe needs $100 - $10 = $<<100-10=90>>90.\n#### 90",
    "3 - 10 = <<3-10=-7>>-7\n#### -7",
    "It is 1,000 + 80 = <<1000+80=1080>>1080\n#### 1,080",
    "20% of 546,000,000 is 109,200,000\n#### 109,200,000",
    "Twice nothing.\n#### 0",
    "12/60 = $<<12/60=0.2>>0.2 a minute.\n0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
    "1/4 of 36 is 9, and 36 - 9 = 27\n#### 27",
    "10-3 = 7\n#### 7",
    "100\n#### 100",
    "In 1999 there were 3; 15 years later 3 * 15 = 45\n#### 45",
    "The price is $2.50, four cost $10.00\n#### 10",
    "(5 + 5) * 3 = 30\n#### 30",
    "x + 2x = 33, so x = 11\n#### 11",
    "7 days * 24 = 168 hours\n#### 168",
    "$1,250 / 5 = $250\n#### 250",
    "50% + 25% = 75%\n#### 75",
    "2 dozen = 24\n24 + 1 = 25\n#### 25",
    "9 o'clock - 5 hours = 4\n#### 4",
    "60 mph * 2.5 h = 150 miles\n#### 150",
]


def gold_answers():
    """Return the answers of the whole data set in the folder MEGARL_GSM8K, or the twenty above if it is unset."""
    if not os.environ.get("MEGARL_GSM8K"):
        return GOLD_ANSWERS
    folder = Path(os.environ["MEGARL_GSM8K"])
    lines = [line for split in ("train", "test") for line in (folder / f"{split}.jsonl").open(encoding="utf-8")]
    return [json.loads(line)["answer"] for line in lines]


@pytest.mark.parametrize("answers", [GOLD_ANSWERS, gold_answers()], ids=["examples", "data set"])
def test_rewards_gold_answers_and_not_changed_ones(answers):
    for answer in answers:
        steps, _, ground_truth = answer.partition("####")
        ground_truth = ground_truth.strip()
        changed = f"{steps}#### {int(ground_truth.replace(',', '')) + 1}"
        for reward in (gsm8k, gsm8k_strict):
            assert reward(rollout(answer, ground_truth.replace(",", ""))) == 1.0, answer
            assert reward(rollout(changed, ground_truth.replace(",", ""))) == 0.0, answer
