import logging

import pytest
import torch
import transformers

from finetune import data, model
from finetune.model import (
    MODEL,
    SIZES,
    build_model,
    load_model,
    load_tokenizer,
    train_tokenizer,
)

from ..package.ranks import run


def sentences():
    rows = data.read_sample("train")
    return [row[name] for name in ("sentence1", "sentence2") for row in rows]


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(model, "from_hub", lambda *_: None)


@pytest.fixture
def hub_answers(monkeypatch):
    monkeypatch.setattr(model, "from_hub", lambda what, repository, load: load(False))


@pytest.mark.parametrize(("size", "published"), [("135m", 134_515_008), ("360m", 361_821_120)])
def test_large_sizes_have_the_published_parameters_and_a_head(size, published):
    with torch.device("meta"):
        model = build_model(size)
    head = 2 * SIZES[size].hidden_size
    assert sum(parameter.numel() for parameter in model.parameters()) == published + head


@pytest.mark.parametrize(("size", "count"), [("5m", 5e6), ("25m", 25e6)])
def test_small_sizes_have_about_the_parameters_of_their_name(size, count):
    with torch.device("meta"):
        model = build_model(size)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert abs(found - count) / count < 0.05


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_of_the_same_family(size):
    with torch.device("meta"):
        config = build_model(size).config
    assert config.num_attention_heads == 3 * config.num_key_value_heads
    assert 3 * config.intermediate_size == 8 * config.hidden_size
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    assert (
        config.to_dict().get("rope_theta", 0) == 1e5 or config.rope_parameters["rope_theta"] == 1e5
    )


def test_the_seed_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed)
        model = load_model("tiny")
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_padding_and_dropout_change_nothing():
    torch.manual_seed(0)
    model = load_model("tiny").train()
    tokens = torch.randint(3, 2048, (2, 11))
    padded = torch.nn.functional.pad(tokens, (0, 13), value=model.config.pad_token_id)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (0, 13))
    logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits, logits)
    other = torch.where(mask.bool(), padded, 7)
    other[:, -1] = model.config.pad_token_id
    assert not torch.allclose(model(other).logits, logits)


def test_small_models_never_ask_the_hub(monkeypatch, caplog):
    monkeypatch.setattr(model, "from_hub", lambda *_: pytest.fail("the hub was asked"))
    caplog.set_level(logging.INFO)
    tokenizer = load_tokenizer(sentences(), "tiny")
    load_model("tiny")
    load_tokenizer(sentences(), "360m", pretrained=False)
    assert len(tokenizer) <= SIZES["tiny"].vocab_size
    assert "model tiny: random weights, 0.6 million parameters" in caplog.text
    assert "tokenizer trained on the training sentences" in caplog.text


def test_without_hub_the_tokenizer_of_a_large_model_is_trained(no_hub):
    tokenizer = load_tokenizer(sentences(), "360m")
    assert tokenizer.pad_token_id == build_model("tiny").config.pad_token_id
    assert tokenizer.padding_side == "right"


def test_without_hub_the_largest_model_is_random(no_hub, monkeypatch, caplog):
    monkeypatch.setitem(SIZES, "360m", SIZES["tiny"])
    caplog.set_level(logging.INFO)
    load_model("360m")
    assert "model 360m: random weights" in caplog.text


def test_the_hub_gives_pinned_weights_as_float32_that_pad_as_the_tokenizer_does(
    monkeypatch, hub_answers
):
    asked = []

    def from_pretrained(model_id, **options):
        asked.append((model_id, options["revision"], options["num_labels"]))
        assert options["local_files_only"] is False
        model = build_model("tiny").to(torch.bfloat16)
        model.config.pad_token_id = None
        return model

    auto = transformers.AutoModelForSequenceClassification
    monkeypatch.setattr(auto, "from_pretrained", staticmethod(from_pretrained))
    model = load_model("360m")
    assert asked == [(MODEL.id, MODEL.revision, 2)]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.pad_token_id == train_tokenizer(["a b"], 300).pad_token_id


def test_the_hub_gives_the_pinned_tokenizer(monkeypatch, hub_answers):
    asked = []
    trained = train_tokenizer(sentences(), 500)

    def from_pretrained(model_id, **options):
        asked.append((model_id, options["revision"], options["local_files_only"]))
        return trained

    auto = transformers.AutoTokenizer
    monkeypatch.setattr(auto, "from_pretrained", staticmethod(from_pretrained))
    assert load_tokenizer([], "135m") is trained
    assert asked == [(MODEL.id, MODEL.revision, False)]


def test_every_rank_trains_the_same_tokenizer_and_it_loses_no_text():
    def vocabulary(rank):
        return train_tokenizer(sentences(), 1024).get_vocab()

    first, second, third = run(vocabulary, 3, timeout=120)
    assert first == second == third
    tokenizer = train_tokenizer(sentences(), 1024)
    assert tokenizer.get_vocab() == first
    text = "Zoë paid 12.50 € for “tea”\n\tand left."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
