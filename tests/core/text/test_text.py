import itertools
import json
import subprocess
import sys
import threading

import pytest
from hypothesis import assume, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.core.config.tree import ModelConfig
from engine.core.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.core.text.detokenizer import Detokenizer, TextDelta
from engine.core.text.token_stream import TokenStream
from engine.core.text.tokenizer import Tokenizer
from engine.core.types import Output, SamplingParams, TokenLogprobs

CORPUS = [
    "def main(args): return the other thing",
    "Über straße 你好世界 🦀🦀 👩\u200d👧 end",
    "  indent\n\tx = 1\n\n",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLACEMENT = "\ufffd"


def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(["<think>", "你好 é"])
    return backend


def unusual():
    """A byte-level vocabulary whose decoder is none of those the tokenizer knows by sight."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def byte_fallback():
    """As Llama 2 has it: spaces are ▁, characters not in the vocabulary become tokens for their bytes."""
    letters = ["▁", *"abcdefghimnorstux=()12", "é", "世", "th", "the", "▁t", "▁the", "in", "er", REPLACEMENT]
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("▁", "t"), ("▁", "the"), ("i", "n"), ("e", "r")]
    model = models.BPE({name: at for at, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return backend


def metaspace():
    letters = ["▁", *"abcdefghimnorstux=()12\n\t", "é", "你", "▁the", "▁t", "the", "ing", "🦀", "<unk>"]
    backend = Backend(models.Unigram([(name, -1.0 - at / 9) for at, name in enumerate(letters)], len(letters) - 1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return backend


def word_piece():
    words = [
        "[UNK]",
        *"abcdefghinorst.,'",
        *("##" + letter for letter in "abcdefghinorst"),
        "the",
        "##ing",
        "don",
        "世",
    ]
    backend = Backend(models.WordPiece({name: at for at, name in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return backend


def wrap(backend, **settings_):
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **settings_)


BUILDERS = {each.__name__: each for each in (byte_level, byte_fallback, metaspace, word_piece, unusual)}
TOKENIZERS = {name: Tokenizer(wrap(build())) for name, build in BUILDERS.items()}
LOSSLESS = ("byte_level", "byte_fallback", "unusual")
BYTES_OF = {name: TOKENIZERS[name.replace("unusual", "byte_level")].token_bytes for name in LOSSLESS}

every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
texts = st.text(
    st.one_of(st.sampled_from("the in\n\t ▁é世你🦀👩\u200d👧"), st.characters(exclude_categories=["Cs"])), max_size=30
)
token_lists = st.lists(st.integers(0, 10**6).map(lambda number: number % 345), max_size=30)


def feed_all(detokenizer, tokens, cuts=(), reason="length", stop_token=None):
    """Feed the tokens in pieces that end at the cuts; all deltas."""
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    deltas = [
        detokenizer.feed(Output(request="r", tokens=tuple(tokens[start:end])))
        for start, end in itertools.pairwise(edges)
    ]
    tail = () if stop_token is None else (stop_token,)
    deltas.append(detokenizer.feed(Output(request="r", tokens=tail, finish_reason=reason, stop_token=stop_token)))
    return deltas


def detokenize(tokenizer, tokens, prompt=(), cuts=(), **asked):
    return feed_all(Detokenizer(tokenizer, prompt, SamplingParams(**asked)), tokens, cuts)


def joined(deltas):
    return "".join(delta.text for delta in deltas)


# --- Tokenizer ---


@every_tokenizer
def test_tokens_decode_as_the_library_decodes(tokenizer):
    text = "the other"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == text


def test_special_tokens_are_kept_on_request():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the</s>")
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the</s>"
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.vocab_size == 332


@every_tokenizer
def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    assert tokenizer.decode([10**6]) == tokenizer.token_text(10**6) == ""
    for use in (lambda: tokenizer.decode([-1]), lambda: Detokenizer(tokenizer, (-1,), SamplingParams())):
        with pytest.raises(InvalidRequestError, match="token id is negative or above"):
            use()


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequestError, match="surrogate"):
        TOKENIZERS["byte_level"].encode("a\ud800")


@given(ids=st.lists(st.integers(0, 500), max_size=20))
def test_bytes_of_tokens_are_the_text(ids):
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]
        pieces = b"".join(map(tokenizer.token_bytes, ids))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert pieces.decode("utf-8", "replace") in (text, " " + text)  # a decoder may drop a space at the beginning


def test_token_texts():
    llama, gpt, bert = TOKENIZERS["byte_fallback"], TOKENIZERS["byte_level"], TOKENIZERS["word_piece"]
    find = llama._backend.token_to_id
    assert [llama.token_text(find(name)) for name in ("▁the", "the", "<s>", "<0x0A>")] == [" the", "the", "<s>", "\n"]
    assert llama.token_bytes(find("<0xE4>")) == b"\xe4"
    assert llama.token_text(find("<0xE4>")) == REPLACEMENT
    crab = gpt.encode("🦀x")
    assert b"".join(map(gpt.token_bytes, crab)) == "🦀x".encode()
    assert [bert.token_text(bert._backend.token_to_id(name)) for name in ("the", "##ing", "</s>")] == [
        " the",
        "ing",
        " </s>",
    ]


def test_encode_neither_cuts_nor_fills():
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=100)
    assert (
        Tokenizer(wrap(backend, model_max_length=2)).decode(
            Tokenizer(wrap(backend, model_max_length=2)).encode("the other thing")
        )
        == "the other thing"
    )


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = Tokenizer(wrap(byte_level()))
    begun, ended = threading.Event(), threading.Event()

    def encode():
        begun.set()
        tokenizer.encode("x " * 100_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3


def save(path, backend, **config):
    backend.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(names | config))
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def test_open_reads_as_transformers_does(tmp_path):
    from transformers import PreTrainedTokenizerFast

    backend = byte_level()
    save(tmp_path, backend, chat_template=TEMPLATE)
    ours, theirs = Tokenizer.open(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("the </s> other", "  in\n é 🦀"):
        ids = backend.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, False) == theirs.decode(ids)
    assert ours.eos_token_id == theirs.eos_token_id
    messages = [{"role": "user", "content": "the other"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat(messages) == expected


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace", "word_piece"])
def test_open_takes_the_file_at_its_word(tmp_path, name):
    """Whatever tokenizer_class says: transformers 5 would put a pre-tokenizer of its own into a Llama's."""
    backend = BUILDERS[name]()
    tokenizer = Tokenizer.open(save(tmp_path, backend))
    for text in ("the </s> other", "  in é 🦀"):
        assert tokenizer.encode(text) == backend.encode(text).ids


def test_opening_and_using_does_not_import_torch(tmp_path):
    save(tmp_path, byte_level(), chat_template=TEMPLATE)
    script = (
        "import sys; from engine.core.text import Tokenizer, Detokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "theirs = 'torch' in sys.modules  # older releases of transformers import it by themselves\n"
        f"tokenizer = Tokenizer.open({str(tmp_path)!r})\n"
        "ids = tokenizer.chat([{'role': 'user', 'content': 'the'}])\n"
        "stream = TokenStream(tokenizer, True); print(''.join(map(stream.push, ids)), tokenizer.decode(ids))\n"
        "assert theirs or 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("user\nthe")


def test_a_chat_template_from_a_file(tmp_path):
    save(tmp_path, byte_level(), chat_template=TEMPLATE)
    file = tmp_path / "other.jinja"
    model = ModelConfig(path=str(tmp_path), chat_template=str(file))
    with pytest.raises(ConfigError, match=r"other\.jinja cannot be read .*--chat-template"):
        Tokenizer.of_model(model)
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")
    tokenizer = Tokenizer.of_model(model)
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "the"}])) == "the!"


def test_a_directory_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Tokenizer.open(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.open(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.open(tmp_path)


# --- chat ---

USER = {"role": "user", "content": "the"}


def chat_text(messages, template=TEMPLATE, **asked):
    tokenizer = Tokenizer(TOKENIZERS["byte_level"]._wrapped, template)
    return tokenizer.decode(tokenizer.chat(messages, **asked), skip_special_tokens=False)


def test_chat_opens_the_answer():
    assert chat_text([USER]) == "<|im_start|>user\nthe</s><|im_start|>assistant\n"
    assert chat_text([USER], add_generation_prompt=False) == "<|im_start|>user\nthe</s>"


def test_chat_goes_on_with_the_last_message():
    text = chat_text([USER, {"role": "assistant", "content": "in the"}], continue_final_message=True)
    assert text == "<|im_start|>user\nthe</s><|im_start|>assistant\nin the"


def test_chat_hands_variables_and_tools_to_the_template():
    assert chat_text([USER], "{{ color }}", color="red") == "red"
    tool = {"type": "function", "function": {"name": "look"}}
    assert chat_text([USER], "{% for t in tools %}{{ t.function.name }}{% endfor %}", tools=[tool]) == "look"


@pytest.mark.parametrize(
    ("messages", "template", "asked", "message", "parameter"),
    [
        ([USER], None, {}, "no chat template.*--chat-template", "messages"),
        ([], TEMPLATE, {}, "messages is empty", "messages"),
        ([USER], "{{ raise_exception('only two roles') }}", {}, "refuses.*only two roles", "messages"),
        ([USER], "{{ messages[0].content + 1 }}", {}, "refuses.*str", "messages"),
        ([USER], "{% if %}", {}, "refuses", "messages"),
        ([USER], TEMPLATE, {"tools": [{"type": "function"}]}, "no place for tools", "tools"),
        ([USER], TEMPLATE, {"tokenize": True}, "tokenize is not a variable", "chat_template_kwargs"),
        (
            [USER],
            TEMPLATE,
            {"continue_final_message": True, "add_generation_prompt": True},
            "not compatible",
            "messages",
        ),
    ],
)
def test_chat_refuses(messages, template, asked, message, parameter):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chat_text(messages, template, **asked)
    assert caught.value.parameter == parameter


# --- TokenStream and Detokenizer: text ---


@every_tokenizer
@settings(max_examples=60, deadline=None)
@given(prompt=token_lists, tokens=token_lists, skip=st.booleans())
def test_any_tokens_add_up_to_the_text_behind_the_prompt(tokenizer, prompt, tokens, skip):
    before = tokenizer.decode(prompt, skip)
    assume(not before.endswith(REPLACEMENT))
    expected = tokenizer.decode(prompt + tokens, skip)[len(before) :]
    deltas = detokenize(tokenizer, tokens, prompt, range(len(tokens)), skip_special_tokens=skip)
    assert joined(deltas) == expected


@every_tokenizer
@settings(max_examples=60, deadline=None)
@given(tokens=token_lists, cuts=st.sets(st.integers(0, 30)), skip=st.booleans(), data=st.data())
def test_tokens_alone_give_the_text_of_whole_outputs(tokenizer, tokens, cuts, skip, data):
    text = tokenizer.decode(tokens, skip)
    at = data.draw(st.integers(0, len(text)))
    stops = data.draw(st.sampled_from([(), (text[at : at + 2] or "x",)]))
    params = SamplingParams(skip_special_tokens=skip, stop=stops)
    whole, short = Detokenizer(tokenizer, (), params), Detokenizer(tokenizer, (), params)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for start, end in itertools.pairwise(edges):
        piece = tokens[start:end]
        assert short.push(piece) == whole.feed(Output(request="r", tokens=tuple(piece))).text
        assert (short.stop_string, short.num_tokens) == (whole.stop_string, whole.num_tokens)
    last = Output(request="r", finish_reason="length")
    assert short.feed(last) == whole.feed(last)


@pytest.mark.parametrize("name", LOSSLESS)
def test_why_the_librarys_own_stream_is_not_used(name):
    """It says nothing while bytes come that are no character, and what is begun at the end is lost; ours tells both."""
    tokenizer = TOKENIZERS[name]
    of = {BYTES_OF[name](token): token for token in range(tokenizer.vocab_size)}
    tokens = [of[b"x"], *[of[b"\xf0"]] * 5]
    theirs = decoders.DecodeStream(skip_special_tokens=True)
    assert [theirs.step(tokenizer._backend, token) for token in tokens] == ["x", *[None] * 5]
    stream = TokenStream(tokenizer, True)
    assert [stream.push(token) for token in tokens] == ["x", "", *[REPLACEMENT] * 4]
    assert stream.flush() == REPLACEMENT


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=60, deadline=None)
@given(text=texts, data=st.data())
def test_valid_text_comes_whole_and_at_once(name, text, data):
    """No half characters, and nothing waits: after each token all characters are out that are complete."""
    tokenizer = TOKENIZERS[name]
    bytes_of = BYTES_OF[name]
    assume(REPLACEMENT not in text)
    prompt, tokens = tokenizer.encode("the"), tokenizer.encode("the" + text)
    assume(tokens[: len(prompt)] == prompt)
    stream, told, seen = TokenStream(tokenizer, False, prompt), "", b""
    for token in tokens[len(prompt) :]:
        told += stream.push(token)
        seen += bytes_of(token)
        assert told == seen.decode("utf-8", "ignore")
    assert told + stream.flush() == text


@pytest.mark.parametrize("name", LOSSLESS)
def test_bytes_that_are_never_a_character_do_not_pile_up(name):
    tokenizer = TOKENIZERS[name]
    lead = next(token for token in range(tokenizer.vocab_size) if BYTES_OF[name](token) == b"\xf0")
    stream = TokenStream(tokenizer, True)
    told = "".join(stream.push(lead) for _ in range(100))
    assert told == REPLACEMENT * 99
    assert len(stream._window) < 10
    assert stream.flush() == REPLACEMENT


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_character_begun_in_the_prompt_is_put_out_whole(name):
    tokenizer = TOKENIZERS[name]
    of = {BYTES_OF[name](token): token for token in range(tokenizer.vocab_size)}
    crab = [of[bytes([byte])] for byte in "🦀".encode()]
    assert joined(detokenize(tokenizer, crab[2:], [*tokenizer.encode("the"), *crab[:2]])) == "🦀"


def test_the_byte_of_a_space_at_the_beginning():
    tokenizer = TOKENIZERS["byte_fallback"]
    space, letter, wrong = (tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in b" x\xff")
    for ids, text in (([space], ""), ([space, letter], "x"), ([space, space], " "), ([space, wrong], REPLACEMENT)):
        assert tokenizer.decode(ids) == joined(detokenize(tokenizer, ids)) == text


def test_a_wrong_byte_leaves_its_neighbours_alone():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in b"\xc3\xa9\xff\n"]
    assert tokenizer.decode(ids) == joined(detokenize(tokenizer, ids)) == f"é{REPLACEMENT}\n"
    assert tokenizer._backend.decode(ids) == REPLACEMENT * 4


def test_the_stop_token_counts_but_is_no_text():
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.eos_token_id
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(skip_special_tokens=False))
    (the,) = tokenizer.encode("<think>")
    delta = detokenizer.feed(Output(request="r", tokens=(the, end), finish_reason="stop", stop_token=end))
    assert delta == TextDelta(text="<think>", tokens=(the, end), offsets=(0, 7), finish_reason="stop")
    assert detokenizer.feed(Output(request="r", tokens=(the,))) == TextDelta()


def test_skipped_tokens_count():
    tokenizer = TOKENIZERS["byte_level"]
    deltas = detokenize(tokenizer, tokenizer.encode("x<s>x"))
    assert [delta.text for delta in deltas] == ["xx", ""]
    assert deltas[0].offsets == (0, 1, 1)


def test_logprobs_come_with_their_tokens():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tuple(tokenizer.encode("xyz"))
    logprobs = tuple(TokenLogprobs(token=token, logprob=-1.0, rank=1) for token in ids)
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=("y",)))
    delta = detokenizer.feed(Output(request="r", tokens=ids, logprobs=logprobs))
    assert (delta.text, delta.tokens, delta.logprobs) == ("x", ids[:2], logprobs[:2])


@settings(deadline=None)
@given(text=texts)
def test_offsets_say_where_each_token_begins(text):
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    deltas = detokenize(tokenizer, ids, cuts=range(len(ids)))
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert offsets == [
        len(b"".join(map(tokenizer.token_bytes, ids[:at])).decode("utf-8", "ignore")) for at in range(len(ids))
    ]


# --- Detokenizer: stop strings ---


def stopped(text, stops):
    """(text before, stop string) by trying every end: the stop string completed first, the longest such."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


small_texts = st.text(st.sampled_from("ab \n🦀"), max_size=25)
stop_lists = st.lists(st.text(st.sampled_from("ab \n🦀"), min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=150, deadline=None)
@given(text=small_texts, stops=stop_lists, data=st.data())
def test_stop_strings_are_found_wherever_they_are(name, text, stops, data):
    tokenizer = TOKENIZERS[name]
    prompt, tokens = tokenizer.encode("the"), tokenizer.encode("the" + text)
    assume(tokens[: len(prompt)] == prompt)
    tokens = tokens[len(prompt) :]
    cuts = data.draw(st.sets(st.integers(0, len(tokens))))
    deltas = detokenize(tokenizer, tokens, prompt, cuts, stop=tuple(stops))
    expected, stop = stopped(text, stops)
    assert joined(deltas) == expected
    ended = [delta for delta in deltas if delta.finish_reason is not None]
    assert [(delta.finish_reason, delta.stop_string) for delta in ended] == [("stop" if stop else "length", stop)]
    counted = [token for delta in deltas for token in delta.tokens]
    assert counted == tokens[: len(counted)]
    if stop:
        through = [tokenizer.decode(prompt + counted)[3:], tokenizer.decode(prompt + counted[:-1])[3:]]
        assert [stopped(each, stops)[1] for each in through] == [stop, None], "the token that completes it is the last"
    else:
        assert len(counted) == len(tokens)
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert len(offsets) == len(counted)
    assert offsets == sorted(offsets)


@given(text=small_texts, stops=stop_lists)
def test_no_more_is_held_back_than_may_be_a_stop_string(text, stops):
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer, told, seen = Detokenizer(tokenizer, (), SamplingParams(stop=tuple(stops))), "", b""
    for token in tokenizer.encode(text):
        delta = detokenizer.feed(Output(request="r", tokens=(token,)))
        told += delta.text
        seen += tokenizer.token_bytes(token)
        if delta.stop_string:
            return
        held = seen.decode("utf-8", "ignore").removeprefix(told)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_across_tokens_and_outputs():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=("yz!",)))
    x, y, z, mark = (tokenizer.encode(letter)[0] for letter in "xyz!")
    assert detokenizer.feed(Output(request="r", tokens=(x, y))) == TextDelta(text="x", tokens=(x, y), offsets=(0, 1))
    assert detokenizer.feed(Output(request="r", tokens=(y, z))) == TextDelta(text="y", tokens=(y, z), offsets=(2, 3))
    delta = detokenizer.feed(Output(request="r", tokens=(mark, x)))
    assert delta == TextDelta(tokens=(mark,), offsets=(4,), finish_reason="stop", stop_string="yz!")
    assert detokenizer.feed(Output(request="r", tokens=(x,), finish_reason="abort")) == TextDelta()


@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [(0, "", "xy"), (1, "", "xy"), (2, "xyz", "xy"), (4, "xyz", "xy"), (5, "xyzxyz", None)],
)
def test_stop_strings_wait_for_min_tokens(min_tokens, text, stop):
    tokenizer = TOKENIZERS["byte_level"]
    deltas = detokenize(tokenizer, tokenizer.encode("xyzxyz"), stop=("xy",), min_tokens=min_tokens)
    assert (joined(deltas), max((delta.stop_string for delta in deltas), key=bool)) == (text, stop)


def test_a_stop_string_in_what_the_end_brings():
    tokenizer = TOKENIZERS["byte_level"]
    lead = tokenizer.encode("🦁")[0]
    assert not tokenizer.token_bytes(lead).decode("utf-8", "ignore")
    deltas = detokenize(tokenizer, [*tokenizer.encode("x"), lead], stop=(REPLACEMENT,))
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("x", None), ("", "stop")]


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_the_end_puts_out_what_was_held(reason):
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, (), SamplingParams(stop=("xyz",)))
    deltas = feed_all(detokenizer, tokenizer.encode("zxy"), reason=reason)
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("z", None), ("xy", reason)]
