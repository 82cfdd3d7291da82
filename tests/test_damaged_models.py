"""Damaged model folders, tokenizers and models: each ends in one message, and none in numbers, a traceback or a wait.

What nothing can know is a damage that leaves another model that fits. One expert a token instead of two, another rope
base, activation, epsilon or window, more heads of the same total width, a square matrix turned over, zeros, weights or
a tokenizer of another model of the same shapes: `FITS` holds these. They are answered, and are not counted."""
from collections import Counter
import json
import multiprocessing
import os
from pathlib import Path
import resource
import shutil
import struct
import sys
import warnings

import pytest
from safetensors.torch import load_file, save_file
import torch
from transformers.utils import logging

from moe_redistribution.instruments.ablation import ablate
from moe_redistribution.opened.families import tiny_model
from moe_redistribution.opened.opened import open_model
from moe_redistribution.instruments.scores import routing_scores, tally
from moe_redistribution.opened.decomposition import answer_terms
from moe_redistribution.opened.weights import _check_files, _check_weights, _hole_in, _weights_in, read_model
from moe_redistribution.record import cli
from toys import Adapted

logging.disable_progress_bar()
FILES, INDEX = "model.safetensors", "model.safetensors.index.json"
SECONDS, MEMORY = 120, 24 << 30

# -------------------------------------------------------------------------------------------------------- how to spoil

def weights(change, file=FILES):
    "A damage: the tensors of a file are what `change` makes of them, or are left in it."
    def spoil(folder):
        own = load_file(folder / file)
        own = own if (new := change(own)) is None else new
        save_file({n: w.contiguous() for n, w in own.items()}, folder / file, {"format": "pt"})
    return spoil

def one(part, change):
    "Of the weights whose name has `part` the first is changed."
    def spoil(own):
        name = next(n for n in own if part in n)
        own[name] = change(own[name].clone())
    return weights(spoil)

def without(part): return weights(lambda own: {n: w for n, w in own.items() if part not in n})

def renamed(old, new): return weights(lambda own: {n.replace(old, new): w for n, w in own.items()})

def put(value, at=0):
    def change(w):
        w.flatten()[at] = value
        return w
    return change

def config(name="config.json", **changes):
    def spoil(folder):
        own = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in own.items() if v != "gone"}))
    return spoil

def content(name, change):
    "A damage of the bytes of a file, or of its name in the folder if `change` gives None."
    def spoil(folder):
        data = (folder / name).read_bytes() if (folder / name).exists() else b""
        (folder / name).unlink(missing_ok=True)
        if (new := change(data) if callable(change) else change) is not None: (folder / name).write_bytes(new)
    return spoil

def no_file(name, make):
    "What is no file stands under the name of one."
    def spoil(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
    return spoil

def header(change):
    "A damage of what a safetensors file says of its tensors."
    def spoil(data):
        n, = struct.unpack("<Q", data[:8])
        own = json.loads(data[8:8 + n])
        new = json.dumps(change(own) or own).encode()
        return struct.pack("<Q", len(new)) + new + data[8 + n:]
    return content(FILES, spoil)

def told(part, **changes):
    def change(own):
        name = next(n for n in own if part in n)
        own[name] |= changes
    return header(change)

def sparse(name, begin=b""):
    def spoil(folder):
        with open(folder / name, "wb") as f: f.write(begin), f.truncate(2 << 30)
    return spoil

def sharded(then):
    "The folder in shards, and then a damage."
    def spoil(folder):
        own = load_file(folder / FILES)
        (folder / FILES).unlink()
        where = {}
        for i, part in enumerate((list(own)[::2], list(own)[1::2]), 1):
            where |= dict.fromkeys(part, name := f"model-{i:05}-of-00002.safetensors")
            save_file({n: own[n] for n in part}, folder / name, {"format": "pt"})
        (folder / INDEX).write_text(json.dumps(dict(metadata=dict(total_size=1), weight_map=where)))
        then(folder)
    return spoil

def index(change):
    def spoil(folder):
        own = json.loads((folder / INDEX).read_text())
        own = change(own["weight_map"]) or own
        (folder / INDEX).write_text(json.dumps(own))
    return sharded(spoil)

def family(name, then=lambda folder: None, **sizes):
    "A folder of another family, and then a damage."
    def spoil(folder):
        shutil.rmtree(folder)
        tiny_model(name, **dict(vocab_size=256) | sizes).save_pretrained(folder)
        then(folder)
    return spoil

def several(*damages):
    def spoil(folder):
        for d in damages: d(folder)
    return spoil

SHARD = "model-00002-of-00002.safetensors"
LOOP, PIPE = lambda p: p.symlink_to(p.name), os.mkfifo
NAN, INF = float("nan"), float("inf")

def both_ways(folder):
    every = {n: 0 * w for f in folder.glob("*.safetensors") for n, w in load_file(f).items()}
    save_file(every, folder / FILES, {"format": "pt"})

def twice(folder):
    "A weight is in both shards, with other numbers."
    a, b = (load_file(folder / f"model-0000{i}-of-00002.safetensors") for i in (1, 2))
    save_file(a | {next(iter(b)): 0 * next(iter(b.values()))}, folder / SHARD.replace("00002-", "00001-"),
              {"format": "pt"})

def adapter(folder):
    (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=2, target_modules=["o_proj"],
                                                                base_model_name_or_path="/nowhere")))
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 32)}, folder / "adapter_model.safetensors")

QUANTISED = dict(gptq=dict(quant_method="gptq", bits=4), fp8=dict(quant_method="fp8"), unheard=dict(quant_method="x"),
                 bnb=dict(quant_method="bitsandbytes", load_in_4bit=True), no_method=dict(bits=4), number=4)
ROPE = "rope_parameters"
DAMAGES = {
    "a matrix less": without("layers.1.self_attn.q_proj"), "routers less": without("gate.weight"),
    "experts less": without("experts."), "an expert less": without("layers.0.block_sparse_moe.experts.3"),
    "a matrix of an expert less": without("experts.2.w3"), "a norm less": without("post_attention_layernorm"),
    "the last norm less": without("model.norm"), "embedding less": without("embed_tokens"),
    "head less": without("lm_head"), "no weights at all": without(""), "all renamed": renamed("model.", "x."),
    "a layer renamed": renamed("layers.1", "layers.7"), "a matrix renamed": renamed("q_proj", "query"),
    "a weight more": weights(lambda own: own | {"model.extra": torch.ones(3)}),
    "a bias more": weights(lambda own: own | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
    "transposed": one("k_proj", lambda w: w.T), "an expert transposed": one("w2", lambda w: w.T),
    "cut rows": one("lm_head", lambda w: w[:9]), "flat": one("q_proj", lambda w: w.flatten()),
    "an axis more": one("norm", lambda w: w[None]), "a scalar": one("norm", lambda w: w[0]),
    "no entries": one("o_proj", lambda w: w[:0]),
    "nan": one("v_proj", put(NAN)), "inf": one("o_proj", put(INF)), "-inf in a router": one("gate", put(-INF)),
    "nan in a row of the embedding": one("embed", put(NAN, -1)), "nan in an expert": one("experts.1.w1", put(NAN)),
    "nan in a norm": one("input_layernorm", put(NAN)), "huge": one("lm_head", lambda w: w * 1e38),
    "whole numbers": one("q_proj", lambda w: (9 * w).to(torch.int32)),
    "whole numbers of eight bytes": one("q_proj", lambda w: (9 * w).to(torch.int64)),
    "all bytes": weights(lambda own: {n: w.to(torch.int8) for n, w in own.items()}),
    "truth values": one("gate", lambda w: w > 0), "complex": one("o_proj", lambda w: w.to(torch.complex64)),
    "8 bits": one("o_proj", lambda w: w.to(torch.float8_e4m3fn)),
    "all 8 bits": weights(lambda own: {n: w.to(torch.float8_e4m3fn) for n, w in own.items()}),
    "cut at the end": content(FILES, lambda x: x[:-100]),
    "cut in the middle": content(FILES, lambda x: x[:len(x) // 2]),
    "cut in the header": content(FILES, lambda x: x[:60]), "seven bytes": content(FILES, lambda x: x[:7]),
    "empty": content(FILES, b""), "noise": content(FILES, os.urandom(9999)), "words": content(FILES, b"weights " * 999),
    "zeros": content(FILES, lambda x: bytes(len(x))), "longer": content(FILES, lambda x: x + b"x" * 99),
    "header of 2^64": content(FILES, lambda x: b"\xff" * 8 + x[8:]),
    "header of another length": content(FILES, lambda x: struct.pack("<Q", 50) + x[8:]),
    "offsets beyond": told("q_proj", data_offsets=[1 << 40, (1 << 40) + 4096]),
    "offsets twice": told("q_proj", data_offsets=[0, 4096]), "type unheard": told("q_proj", dtype="F99"),
    "shape of another size": told("q_proj", shape=[32, 99]), "shape below zero": told("q_proj", shape=[-32, -32]),
    "no weights": content(FILES, None), "a pickle only": several(content(FILES, None),
                                                                content("pytorch_model.bin", b"\x80\x04.")),
    "sparse 2 GB": sparse(FILES), "sparse 2 GB with a header": sparse(FILES, struct.pack("<Q", 1 << 30) + b'{"a":{'),
    "pipe": no_file(FILES, PIPE), "loop": no_file(FILES, LOOP), "leads nowhere": no_file(FILES, lambda p:
                                                                                       p.symlink_to("gone")),
    "a folder for weights": no_file(FILES, os.mkdir), "a device": no_file(FILES, lambda p: p.symlink_to("/dev/zero")),
    "adapter": adapter,
    # shards
    "index less a weight": index(lambda m: m.pop("lm_head.weight") and None),
    "index names a weight more": index(lambda m: m.update({"model.more": SHARD})),
    "index to no shard": index(lambda m: m.update({"lm_head.weight": "model-00009-of-00009.safetensors"})),
    "index to outside": index(lambda m: m.update({"lm_head.weight": "../outside.safetensors"})),
    "index to a config": index(lambda m: m.update({"lm_head.weight": "config.json"})),
    "index to one shard": index(lambda m: m.update(dict.fromkeys(m, SHARD))),
    "index empty": index(lambda m: m.clear()), "index without a map": index(lambda m: {"metadata": {}}),
    "index no map": index(lambda m: {"metadata": {}, "weight_map": [1]}),
    "index a list": index(lambda m: [1]), "index cut": sharded(content(INDEX, lambda x: x[:-9])),
    "index pipe": sharded(no_file(INDEX, PIPE)), "index loop": sharded(no_file(INDEX, LOOP)),
    "no index": sharded(content(INDEX, None)), "index sparse": sharded(sparse(INDEX, b'{"a":')),
    "shard less": sharded(content(SHARD, None)), "shard cut": sharded(content(SHARD, lambda x: x[:-9])),
    "shard empty": sharded(content(SHARD, b"")), "shard pipe": sharded(no_file(SHARD, PIPE)),
    "shard twice": sharded(lambda f: shutil.copy(f / SHARD, f / SHARD.replace("00002-", "00001-"))),
    "a weight in two shards": sharded(twice), "whole and in shards": sharded(both_ways),
    # the config
    "no config": content("config.json", None), "config empty": content("config.json", b""),
    "config cut": content("config.json", lambda x: x[:-9]), "config a list": content("config.json", b"[1, 2]"),
    "config null": content("config.json", b"null"), "config noise": content("config.json", os.urandom(999)),
    "config deep": content("config.json", b'{"a":' * 99999), "config pipe": no_file("config.json", PIPE),
    "config loop": no_file("config.json", LOOP), "config device": no_file("config.json", lambda p:
                                                                         p.symlink_to("/dev/zero")),
    "config sparse": sparse("config.json", b'{"a": 1'), "config a folder": no_file("config.json", os.mkdir),
    "config utf-16": content("config.json", lambda x: x.decode().encode("utf-16")),
    **{f"layers {n!r}": config(num_hidden_layers=n) for n in (3, 1, 0, -1, 100_000, 10**18, "two", 2.5, None, [2])},
    **{f"heads {n!r}": config(num_attention_heads=n) for n in (3, 0, -4, "four", None, 10**12)},
    **{f"heads of values {n!r}": config(num_key_value_heads=n) for n in (3, 1, 0, -2)},
    **{f"experts {n!r}": config(num_local_experts=n) for n in (3, 5, 0, -1, 10**9, 10**15)},
    **{f"top {n!r}": config(num_experts_per_tok=n) for n in (5, 0, -1, 1.5, "two", None)},
    **{f"width {n!r}": config(hidden_size=n) for n in (16, 64, 0, 33, -32, 10**7, 10**12, "x")},
    **{f"width within {n!r}": config(intermediate_size=n) for n in (23, 0, 10**10)},
    **{f"width of a head {n!r}": config(head_dim=n) for n in (4, 16, 0, -8, 7)},
    **{f"vocabulary {n!r}": config(vocab_size=n) for n in (255, 257, 0, -1, 10**12, None)},
    **{f"positions {n!r}": config(max_position_embeddings=n) for n in (8, 0, -1, "x")},
    **{f"rope {n!r}": config(**{ROPE: n}) for n in (
        dict(rope_type="unheard"), dict(rope_type="default", rope_theta=0), dict(rope_type="default", rope_theta=-1.),
        dict(rope_type="default", rope_theta=NAN), dict(rope_type="default", rope_theta="x"), dict(rope_type="yarn"),
        dict(rope_type="linear", rope_theta=1e4, factor=0.), 7)},
    **{f"eps {n!r}": config(rms_norm_eps=n) for n in (NAN, INF, -1e9, "x", None)},
    **{f"activation {n!r}": config(hidden_act=n) for n in ("unheard", 7, None)},
    **{f"model type {n!r}": config(model_type=n) for n in (
        "unheard", "gone", None, 3, "llama", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2", "bert", "t5")},
    **{f"architecture {n!r}": config(architectures=n) for n in (
        ["LlamaForCausalLM"], ["MixtralForSequenceClassification"], ["Unheard"], "x")},
    **{f"quantised {n}": config(quantization_config=q) for n, q in QUANTISED.items()},
    **{f"type {n!r}": config(dtype=n) for n in ("bogus", "int8", "float8_e4m3fn", 7)},
    "tied, and two matrices": config(tie_word_embeddings=True), "attention unheard": config(_attn_implementation="x"),
    **{f"{n} from the hub": config(**{n: "org/kernel"}) for n in ("_attn_implementation", "_experts_implementation",
                                                                 "attn_implementation", "experts_implementation")},
    "window 0": config(sliding_window=0), "window -3": config(sliding_window=-3),
    "own code": config(auto_map={"AutoModelForCausalLM": "evil.M"}, model_type="unheard"),
    "tied in the file only": family("llama", config(tie_word_embeddings=False), tie_word_embeddings=True),
    "layer types less": family("gpt_oss", config(layer_types=["full_attention"])),
    "layer types unheard": family("gpt_oss", config(layer_types=["x", "full_attention"])),
    "groups of 3": family("deepseek_v3", config(n_group=3)), "groups of 0": family("deepseek_v3", config(n_group=0)),
    "all layers dense": family("deepseek_v3", config(first_k_dense_replace=9)),
    "no layer dense": family("deepseek_v3", config(first_k_dense_replace=0)),
    "no shared expert": family("deepseek_v3", config(n_shared_experts=0)),
    # what comes with it
    "generation pipe": no_file("generation_config.json", PIPE),
    "generation sparse": sparse("generation_config.json", b'{"a": 1'),
    "folder empty": lambda f: (shutil.rmtree(f), f.mkdir()), "folder gone": shutil.rmtree,
    "a file for a folder": lambda f: (shutil.rmtree(f), f.write_text("x")),
    "loop for a folder": lambda f: (shutil.rmtree(f), f.symlink_to(f.name)),
    "pipe for a folder": lambda f: (shutil.rmtree(f), os.mkfifo(f))}

FITS = {
    "one expert a token": config(num_experts_per_tok=1), "rope base": config(**{ROPE: dict(rope_type="default",
                                                                                          rope_theta=99.)}),
    "activation": config(hidden_act="gelu"), "epsilon": config(rms_norm_eps=.1), "window": config(sliding_window=4),
    "heads of the same width": several(config(num_attention_heads=8, num_key_value_heads=4, head_dim=4)),
    "square matrix turned": one("q_proj", lambda w: w.T), "zeros": one("o_proj", torch.zeros_like),
    "another's weights": lambda f: tiny_model("mixtral", seed=9, vocab_size=256).save_pretrained(f),
    "no architecture": config(architectures="gone"), "positions more": config(max_position_embeddings=99),
    "generation cut": content("generation_config.json", b"{"),
    "class of the tokenizer": config("tokenizer_config.json", tokenizer_class="Unheard"),
    "code of the tokenizer": config("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})}

TOKENIZERS = {
    "none": lambda f: [p.unlink() for p in f.glob("tokenizer*")], "cut": content("tokenizer.json", lambda x: x[:-9]),
    "empty": content("tokenizer.json", b""), "noise": content("tokenizer.json", os.urandom(999)),
    "pipe": no_file("tokenizer.json", PIPE), "loop": no_file("tokenizer.json", LOOP),
    "sparse": sparse("tokenizer.json", b'{"a": 1'), "a list": content("tokenizer.json", b"[]"),
    "config a list": content("tokenizer_config.json", b"[1]"), "config cut": content("tokenizer_config.json", b"{"),
    "more words than rows": lambda f: words_of(f, 300), "no words": lambda f: words_of(f, 0)}

def words_of(folder, n):
    "A tokenizer of n words, of which the text has the last ones."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    said = [f"x{i}" for i in range(n - 5)] + ["And", "there", "was", "light", "."][:n]
    own = Tokenizer(models.WordLevel({w: i for i, w in enumerate(said)}, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(folder)

# ----------------------------------------------------------------------------------------------- what becomes of it

TEXT = "And there was light . " * 60
COMMANDS = {"scores": [], "ablate": [], "gates": ["--steps", "1", "--k", "4"]}

@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "text").write_text(TEXT)
    tiny_model("mixtral", vocab_size=256).save_pretrained(tmp_path / "good")
    words_of(tmp_path / "good", 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path

def work(words):
    "In a process of its own, whose memory has an end."
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for fd, name in ((1, "said"), (2, "err")): os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
    try: status = cli.main(words)
    except BaseException as e: status = f"raised {type(e).__name__}"
    sys.stderr.flush()
    Path("status").write_text(f"{status}")
    os._exit(0)

def spoilt(place, damage):
    "A copy of the good folder, damaged."
    folder = place / "model"
    if folder.is_dir() and not folder.is_symlink(): shutil.rmtree(folder)
    elif os.path.lexists(folder): folder.unlink()
    shutil.copytree(place / "good", folder)
    damage(folder)
    return folder

def end_of(folder, command, *more):
    "refused, silent, traceback, hang or killed, and what was said."
    Path("status").unlink(missing_ok=True)
    words = [command, "--model", f"{folder}", "--text", "text", "--context", "16", "--tokens", "64", "--out", "o.csv"]
    p = multiprocessing.get_context("fork").Process(target=work, args=([*words, *COMMANDS[command], *more],))
    p.start(), p.join(SECONDS)
    if late := p.is_alive(): p.kill(), p.join()
    err = Path("err").read_text(errors="replace")
    lines = [x for x in err.splitlines() if x.startswith("moe-redistribution: ")]
    status = "hang" if late else Path("status").read_text() if Path("status").exists() else "killed"
    if status == "2" and len(lines) == 1 and "; fix: " in lines[0] and "Traceback" not in err: return "refused", err
    return {"0": "silent", "70": "traceback"}.get(status, status), err

def counted(place, damages, *more):
    "Kinds of ends of all damages, under one command after the other, and those that are not `refused`."
    found, bad = Counter(), []
    for i, (name, damage) in enumerate(damages.items()):
        command = [*COMMANDS][i % len(COMMANDS)]
        end, said = end_of(spoilt(place, damage), command, *more)
        found[end] += 1
        if end != "refused": bad.append((end, command, name, said[-300:]))
    return found, bad

QUICK = ("a matrix less", "nan in an expert", "whole numbers", "whole numbers of eight bytes", "pipe",
         "index pipe", "a weight in two shards",
         "layers 100000", "adapter", "tied, and two matrices")

def test_a_damaged_folder_is_refused_on_the_command_line(place):
    found, bad = counted(place, {n: DAMAGES[n] for n in QUICK}, "--bytes")
    assert not bad and found["refused"] == len(QUICK), bad

@pytest.mark.audit
def test_no_damaged_folder_is_answered_from_or_ends_in_a_traceback_or_waits(place):
    found, bad = counted(place, DAMAGES, "--bytes")
    print(f"\n{sum(found.values())} damaged model folders: {dict(found)}")
    assert not bad and sum(found.values()) >= 60, "\n".join(map(str, bad))

@pytest.mark.audit
def test_no_damaged_tokenizer_is_answered_with(place):
    found, bad = counted(place, TOKENIZERS)
    print(f"\n{sum(found.values())} damaged tokenizers: {dict(found)}")
    assert not bad, "\n".join(map(str, bad))

@pytest.mark.audit
def test_what_fits_is_answered_and_a_good_folder_too(place):
    found, bad = counted(place, FITS | {"good": lambda f: None})
    assert found == {"silent": len(FITS) + 1}, bad

def test_an_index_that_names_the_whole_file_is_of_one_file(tmp_path):
    tiny_model("mixtral", vocab_size=256).save_pretrained(tmp_path)
    where = dict.fromkeys(load_file(tmp_path / FILES), FILES)
    (tmp_path / INDEX).write_text(json.dumps(dict(metadata={}, weight_map=where)))
    held, told = _weights_in(tmp_path)
    _check_files("m", held, told, quantised=False)
    assert len(held) == len(where)

def test_a_nan_of_eight_bits_is_found():
    model = torch.nn.Linear(2, 2, dtype=torch.float32).requires_grad_(False)
    model.weight.data = torch.tensor([[1, NAN], [1, 1]]).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="1 of 4 not finite in weight"): _check_weights("m", model)

def told_holes(folder):
    "What is said of holes when a folder is opened."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read_model(folder)
    return [str(w.message) for w in said if "zeros in a row" in str(w.message)]

def hole(n, at=0):
    def change(w):
        w.view(-1)[at:at + n] = 0
        return w
    return change

def rows_of_zeros(w):
    w[-64:] = 0                                                                             # words that nobody has
    return w

HOLES = {"in an embedding": ("embed_tokens", hole(1500, 333), "1,500 zeros"),
         "at its end": ("lm_head", hole(1 << 20, 5000), "zeros"),
         "as long as that": ("q_proj", hole(1024, 999), "1,024 zeros in a row in model.layers.0"),
         "in an expert": ("experts.0.w1", hole(1100, 77), "1,100 zeros in a row in model.layers.0"),
         "shorter": ("q_proj", hole(1023, 999), ""), "a whole matrix": ("o_proj", torch.zeros_like, ""),
         "a whole expert's": ("experts.0.w2", torch.zeros_like, ""),
         "half of it": ("experts.1.w1", torch.zeros_like, ""), "rows of padding": ("embed_tokens", rows_of_zeros, "")}

@pytest.mark.parametrize("where", HOLES)
def test_a_hole_of_zeros_is_named_when_a_model_is_opened_and_what_may_be_meant_is_not(where, tmp_path):
    part, change, says = HOLES[where]
    tiny_model("mixtral", vocab_size=256, hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    one(part, change)(tmp_path)
    said = told_holes(tmp_path)
    assert len(said) == bool(says) and says in "".join(said) and "fix: " in "".join(said) or not says, said

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_hole_is_found_wherever_it_begins_and_no_shorter_one_is(dtype):
    for begin, length in [(b, n) for b in (0, 1, 511, 512, 513, 1023, 6000) for n in (1023, 1024, 1025, 3000, 9999)]:
        w = torch.ones(10_000)
        w[begin:begin + length] = 0
        found = _hole_in(w.to(dtype), 20_000)
        assert found == ((begin, min(length, 10_000 - begin)) if length >= 1024 else None), (begin, length)

# ----------------------------------------------------------------------------------------------------- models in memory

TOKENS = torch.randint(1, 50, (4, 13), generator=torch.Generator().manual_seed(3))

def number(of, value):
    def spoil(model):
        with torch.no_grad(): of(model).flatten()[0] = value
    return spoil

def quantised(model): torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
def hooked(of, f): return lambda model: of(model).register_forward_hook(f) and None
def in_config(**changes): return lambda model: model.config.update(changes)

def another_forward(change):
    def spoil(model):
        own = model.forward
        def forward(*args, **kwargs):
            out = own(*args, **kwargs)
            out.logits = change(out.logits)
            return out
        model.forward = forward
    return spoil

def shared(part):
    def spoil(model):
        a, b = model.model.layers
        setattr(b.get_submodule(part[0]) if part[0] else b, part[1], a.get_submodule(".".join(filter(None, part))))
    return spoil

def lora(of, name):
    def spoil(model): setattr(of(model), name, Adapted(getattr(of(model), name), .01))
    return spoil

def layer(model): return model.model.layers[0]
def effect(s): return ablate(s, {"L1.E1": "zero"})
def heads(s): return routing_scores(s, TOKENS, "head")
def edited_heads(s): return tally(s, TOKENS, "head", edits={"L0.ffn_out": torch.zeros_like})
def answers(s): return answer_terms(s, TOKENS[:, :-1], TOKENS[:, 1:])

MODELS = {
    "nan in a norm": (number(lambda m: m.model.norm.weight, NAN), effect),
    "nan in the scores": (number(lambda m: m.model.norm.weight, NAN), answers),
    "attention shared": (shared(("", "self_attn")), effect), "router shared": (shared(("mlp", "gate")), effect),
    "a layer twice": (lambda m: m.model.layers.append(layer(m)), effect),
    "fewer layers by the config": (in_config(num_hidden_layers=1), effect),
    "fewer positions": (in_config(max_position_embeddings=8), effect),
    "no positions": (in_config(max_position_embeddings=0), effect),
    "meta": (lambda m: m.to("meta"), effect), "compiled": (lambda m: m.compile(), effect),
    "more words by the config": (in_config(vocab_size=90), lambda s: s.run(TOKENS + 40 * (s.d_vocab == 90))),
    "half the rows": (lambda m: m.resize_token_embeddings(25), effect),
    "quantised, by heads": (quantised, heads), "quantised, answers": (quantised, answers),
    "adapter on attention, edited": (lora(lambda m: layer(m).self_attn, "o_proj"), edited_heads),
    "adapter on the head": (lora(lambda m: m, "lm_head"), answers),
    "logits capped": (another_forward(lambda x: 30 * torch.tanh(x / 30)), answers),
    "norm with a bias": (hooked(lambda m: m.model.norm, lambda m, a, out: out + .01), answers)}

@pytest.mark.parametrize("damage", MODELS)
def test_a_damaged_model_is_refused(damage):
    spoil, ask = MODELS[damage]
    model = tiny_model("mixtral")
    ask(open_model(model, TOKENS))                                                            # as it was it answers
    spoil(model)
    with pytest.raises((ValueError, RuntimeError)): ask(open_model(model, TOKENS))

@pytest.mark.parametrize("heads", [2, 8])
def test_heads_are_those_that_run_whatever_the_config_says(heads):
    model = tiny_model("mixtral")
    plain = ablate(open_model(model, TOKENS), {"L0.H1": "zero"})
    in_config(num_attention_heads=heads)(model)
    s = open_model(model, TOKENS)
    assert s.n_heads == 4 and ablate(s, {"L0.H1": "zero"}).equal(plain)

def test_a_foreign_hook_is_seen_as_what_it_does():
    on_ffn, on_layer = tiny_model("mixtral"), tiny_model("mixtral")
    hooked(lambda m: layer(m).mlp, lambda m, a, out: out * 0)(on_ffn)
    hooked(layer, lambda m, a, out: out * 2)(on_layer)
    own, other = ([(x.additive, x.sums) for x in open_model(m).layers] for m in (on_ffn, on_layer))
    assert sorted(own) == [(False, True), (True, True)] and sorted(other) == [(True, False), (True, True)]

def test_logits_that_a_model_scales_are_taken_apart_as_it_says_them():
    model = tiny_model("mixtral")
    another_forward(lambda x: x * .5)(model)
    terms = answer_terms(open_model(model), TOKENS[:, :-1], TOKENS[:, 1:])
    assert terms["remainder"].abs().max() < 1e-5

@pytest.mark.parametrize("tokens", [torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.int64),
                                    TOKENS.float(), TOKENS - 9, TOKENS + 40])
def test_what_is_no_tokens_is_refused_by_name(tokens):
    with pytest.raises(ValueError, match="tokens: expected .*numbers"): open_model(tiny_model("llama")).run(tokens)
    for targets in (TOKENS[:, 2:], TOKENS[:, 1:2], TOKENS[:, 1:] + 40, TOKENS[:, 1:] - 40):
        with pytest.raises(ValueError, match="targets: expected numbers below 50"):
            answer_terms(open_model(tiny_model("llama")), TOKENS[:, :-1], targets)
