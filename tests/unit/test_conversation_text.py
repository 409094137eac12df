from hypothesis import given
from hypothesis import strategies as st

from tests.unit.chat_templates import templates, tokenizer_for
from toolrl.conversation import Encoder, clean_text, neutralize, truncate_tokens

SPECIAL = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", '<tool_output name="x">', "aba", "<"]
_pieces = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "<|im_", "end|>", "ab", "a", "<", "|", ">", "\x1b[31m", "\x00", "\ud800", "\r\n"]),
        st.text(),
    )
).map("".join)
ENCODER = Encoder(tokenizer_for(templates()["qwen3"]))


def test_clean_text_removes_what_no_model_should_see():
    assert clean_text("\x1b[1;31mred\x1b[0m\x00 \ud800\r\nnext\rline\t") == "red \ufffd\nnext\nline\t"
    assert clean_text("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\link") == "xlink"
    assert clean_text(b"\xff\xfeok") == "\ufffd\ufffdok"
    assert clean_text("é ☃ 𝔘") == "é ☃ 𝔘"


@given(st.one_of(_pieces, st.binary()))
def test_clean_text_is_total_and_idempotent(raw):
    cleaned = clean_text(raw)
    assert clean_text(cleaned) == cleaned
    cleaned.encode("utf-8")


def test_cleaning_comes_before_neutralising():
    assert neutralize(clean_text("<|im\x00_end|>"), SPECIAL) == "< |im_end|>"


def test_neutralize_breaks_control_strings_and_keeps_the_rest():
    assert neutralize("a <|im_end|> b", SPECIAL) == "a < |im_end|> b"
    assert neutralize("1 < 2 and <b>", SPECIAL) == "1 < 2 and <b>"
    assert neutralize("<|im_end|>", []) == "<|im_end|>"


@given(_pieces)
def test_after_neutralize_no_control_string_is_left(text):
    neutral = neutralize(text, SPECIAL)
    assert not any(string in neutral for string in SPECIAL if len(string) > 1)
    assert neutralize(neutral, SPECIAL) == neutral
    assert neutral.replace(" ", "").replace("\u200b", "") == text.replace(" ", "").replace("\u200b", "")


@given(st.text(), st.lists(st.text(min_size=2, max_size=4), max_size=5))
def test_neutralize_ends_for_any_control_strings(text, strings):
    neutral = neutralize(text, strings)
    assert not any(s in neutral for s in strings if s.strip() and "\u200b" not in s)


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=400),
    st.integers(0, 60),
    st.sampled_from(["head", "tail", "middle"]),
)
def test_truncation_keeps_to_the_budget(text, budget, cut):
    shown, was_cut = truncate_tokens(text, budget, ENCODER, cut)
    assert len(ENCODER.encode(shown)) <= budget
    assert was_cut == (len(ENCODER.encode(text)) > budget)
    assert was_cut or shown == text


def test_truncation_says_where_and_how_much_is_missing():
    text = " ".join(str(n) for n in range(1000))
    tokens = len(ENCODER.encode(text))
    for cut in ("head", "tail", "middle"):
        shown, _ = truncate_tokens(text, 200, ENCODER, cut)
        left_out = int(shown.split("[")[1].split()[0])
        assert "tokens left out]" in shown
        assert 150 < tokens - left_out <= 200
        assert shown.startswith("0 1 2 ") == (cut != "head")
        assert shown.endswith(" 998 999") == (cut != "tail")


class _Slow:
    """A tokenizer without a Rust part: the Python interface alone."""

    def __init__(self) -> None:
        self._fast = tokenizer_for(templates()["qwen3"])
        self.added_tokens_decoder = self._fast.added_tokens_decoder
        self.all_special_tokens = self._fast.all_special_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._fast.encode(text, add_special_tokens=add_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._fast.convert_tokens_to_ids(token)


def test_a_slow_tokenizer_encodes_and_truncates_alike():
    slow = Encoder(_Slow())
    text = "The answer is <|im_end|>\n  42. " * 50
    assert slow.encode(text) == ENCODER.encode(text)
    assert slow.control == ENCODER.control
    shown, was_cut = truncate_tokens(text, 100, slow)
    assert was_cut and 60 < len(slow.encode(shown)) <= 100


def test_truncating_with_the_same_tokenizer_elsewhere_changes_nothing():
    tokenizer = tokenizer_for(templates()["qwen3"])
    encoder = Encoder(tokenizer)
    before = encoder.encode("one two three four five")
    tokenizer("one two three four five", truncation=True, max_length=2)
    assert encoder.encode("one two three four five") == before
