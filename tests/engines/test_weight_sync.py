"""Weights on the wire, by hand; vLLM's own transfer engine, as far as it goes without a GPU."""

from __future__ import annotations

import pickle
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rock_opd.config import RolloutConfig
from rock_opd.engines.weight_sync import (
    PACKED_BUFFER_BYTES,
    Checksums,
    DeviceSender,
    ParamInfo,
    TransferClient,
    compare,
    from_wire,
    init_info,
    is_proof,
    make_source,
    to_wire,
)
from rock_opd.errors import SyncError
from rock_opd.types import Prompt, SampleRequest

HERE = str(Path(__file__))


# --- the wire -------------------------------------------------------------------------------------


def test_float32_crosses_as_it_is_and_without_a_copy():
    weight = torch.randn(3, 5)
    (wire,) = to_wire([("w", weight)])
    assert (wire.name, wire.dtype, wire.array.dtype) == ("w", "float32", np.float32)
    assert np.shares_memory(wire.array, weight.numpy())
    assert torch.equal(from_wire(wire, dtype="float32"), weight)


def test_bf16_crosses_as_its_bits():
    weight = torch.tensor([[1.0, -2.5], [3.14159, 1e-30]], dtype=torch.bfloat16)
    (wire,) = to_wire([("w", weight)])
    assert (wire.dtype, wire.array.dtype, wire.array.shape) == ("bfloat16", np.uint16, (2, 2))
    assert wire.array[0, 0] == 0x3F80  # 1.0
    assert torch.equal(from_wire(wire, dtype="bfloat16"), weight)
    assert torch.equal(from_wire(wire, dtype="float32"), weight.float())


def test_the_cast_to_the_engines_dtype_rounds_to_nearest_even():
    exact = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7])  # bf16 has steps of 2^-7 here
    (wire,) = to_wire([("w", exact)])
    expected = torch.tensor([1.0, 1.0, 1 + 2**-6, 1 + 2**-7], dtype=torch.bfloat16)
    assert torch.equal(from_wire(wire, dtype="bfloat16"), expected)


def test_what_arrives_has_memory_of_its_own():
    source = torch.ones(4)
    (wire,) = to_wire([("w", source)])
    wire.array.flags.writeable = False  # as Ray hands it over
    arrived = from_wire(wire, dtype="float32")
    source.zero_()
    assert arrived.tolist() == [1, 1, 1, 1]


def test_a_bucket_survives_the_way_and_other_dtypes_do_not_start_it():
    bucket = pickle.loads(pickle.dumps(to_wire([("a", torch.ones(2)), ("b", torch.ones(3, 1).T)])))
    assert [(t.name, t.array.shape) for t in bucket] == [("a", (2,)), ("b", (1, 3))]
    with pytest.raises(SyncError, match=r"weight w is torch.float16; weights are sent as float32"):
        to_wire([("w", torch.ones(2).half())])


def test_a_transposed_weight_is_sent_and_summed_up_in_its_own_order():
    weight = torch.arange(6.0).reshape(2, 3).T
    (wire,) = to_wire([("norm.weight", weight)])
    assert wire.array.tolist() == [[0, 3], [1, 4], [2, 5]]
    sums = Checksums()
    sums.update((wire,))
    assert sums.chosen() == {"norm.weight": zlib.crc32(np.array(wire.array).tobytes())}


@pytest.mark.parametrize(
    ("name", "num_dims", "chosen"),
    [
        ("model.embed_tokens.weight", 2, True),
        ("lm_head.weight", 2, True),
        ("model.norm.weight", 1, True),
        ("model.layers.27.input_layernorm.weight", 1, True),
        ("model.layers.0.self_attn.q_proj.weight", 2, True),
        ("model.layers.0.mlp.down_proj.weight", 2, True),
        ("model.layers.0.mlp.experts.0.up_proj.weight", 2, True),
        ("model.layers.0.mlp.experts.gate_up_proj", 3, True),
        ("model.layers.0.mlp.experts.1.up_proj.weight", 2, False),
        ("model.layers.1.self_attn.q_proj.weight", 2, False),
        ("model.layers.10.mlp.down_proj.weight", 2, False),
    ],
)
def test_the_proof_is_the_head_the_norms_and_the_first_layer(
    name: str, num_dims: int, chosen: bool
):
    assert is_proof(name, num_dims) is chosen


def test_checksums_are_the_same_however_the_tensors_are_bucketed():
    named = [(f"model.layers.{i}.input_layernorm.weight", torch.randn(8)) for i in range(5)]
    named += [("lm_head.weight", torch.randn(4, 8)), ("model.layers.1.mlp.x", torch.randn(2, 2))]
    whole, split = Checksums(), Checksums()
    whole.update(to_wire(named))
    for one in named:
        split.update(to_wire([one]))
    assert whole.chosen() == split.chosen() and len(whole.chosen()) == 6


def test_the_first_difference_is_named():
    compare({"a": 1}, {"a": 1, "b": 2}, version=7, where="as it arrived")
    with pytest.raises(SyncError, match="weights v7: tensor b is missing as it arrived"):
        compare({"a": 1, "b": 2}, {"a": 1}, version=7, where="as it arrived")
    expected = "tensor a has checksum 000000ff as it arrived, the trainer sent 00000001"
    with pytest.raises(SyncError, match=expected):
        compare({"b": 2, "a": 1}, {"a": 255, "b": 3}, version=7, where="as it arrived")


# --- arguments of vLLM's transfer engine ----------------------------------------------------------

PARAMS = [ParamInfo(name="a", shape=(4, 2)), ParamInfo(name="b", shape=(3,))]
GROUP = {"master_addr": "10.0.0.1", "master_port": 29511, "num_engines": 3, "tensor_parallel": 2}


def record() -> tuple[list[tuple[str, list[tuple[Any, ...]]]], Callable]:
    calls: list[tuple[str, list[tuple[Any, ...]]]] = []
    return calls, lambda method, args: calls.append((method, args))


def test_every_engine_gets_its_own_place_in_the_nccl_group():
    calls, call = record()
    client = TransferClient(call, num_engines=3, tensor_parallel=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7, "packed": True})
    ((method, args),) = calls
    assert method == "init_weight_transfer_engine"
    # student rank 0, then engines of two GPUs each: 1 2, 3 4, 5 6
    assert [infos["rank_offset"] for (infos,) in args] == [1, 3, 5]
    assert all(infos["world_size"] == 7 and infos["packed"] for (infos,) in args)


def test_the_other_calls_go_to_every_engine_alike():
    calls, call = record()
    client = TransferClient(call, num_engines=2, tensor_parallel=1)
    client.init_weight_transfer_engine({"packed": True})  # IPC: no group
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    assert calls == [
        ("init_weight_transfer_engine", [({"packed": True},)] * 2),
        ("start_weight_update", [(), ()]),
        ("update_weights", [({"names": ["a"]},)] * 2),
        ("finish_weight_update", [(), ()]),
    ]


def test_init_arguments_of_both_backends():
    nccl = init_info("nccl", rank=1, params=PARAMS, dtype="bfloat16", **GROUP)
    assert nccl == {
        "rank": 1,
        "packed": True,
        "packed_buffer_size_bytes": PACKED_BUFFER_BYTES,
        "master_address": "10.0.0.1",
        "master_port": 29511,
        "world_size": 7,
    }
    ipc = init_info("ipc", rank=0, params=PARAMS, dtype="bfloat16", **GROUP)
    assert ipc == {"rank": 0, "packed": True, "packed_buffer_size_bytes": PACKED_BUFFER_BYTES}


def test_the_transfer_buffer_holds_the_largest_tensor():
    large = [ParamInfo(name="embed", shape=(300_000, 4_096))]
    info = init_info("ipc", rank=0, params=large, dtype="bfloat16", **GROUP)
    assert info["packed_buffer_size_bytes"] == 300_000 * 4_096 * 2


class VllmSide:
    """What vLLM makes of our arguments; lives in the engines' process, where vLLM is imported."""

    def trainer_info(self, backend: str) -> dict[str, Any]:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        cls = {"nccl": NCCLTrainerInitInfo, "ipc": IPCTrainerInitInfo}[backend]
        info = cls(**init_info(backend, rank=0, params=PARAMS, dtype="float32", **GROUP))
        return {"backend": info.backend, "is_sender": info.is_sender, "packed": info.packed}

    def worker_places(self) -> list[int]:
        """What vLLM's worker reads of what its NCCL trainer side sends through our client."""
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLWeightTransferEngine,
            NCCLWeightTransferInitInfo,
        )

        calls, call = record()
        sent = {"master_address": "10.0.0.1", "master_port": 29511, "rank_offset": 1}
        client = TransferClient(call, num_engines=3, tensor_parallel=2)
        client.init_weight_transfer_engine(sent | {"world_size": 7, "packed": True})
        parse = NCCLWeightTransferEngine.parse_init_info
        infos = [parse(NCCLWeightTransferEngine, info) for (info,) in calls[0][1]]
        assert all(isinstance(info, NCCLWeightTransferInitInfo) for info in infos)
        return [info.rank_offset for info in infos]

    def source(self, dtype: str) -> tuple[list[Any], list[Any], dict[str, int]]:
        """Weights as declared, as sent (past vLLM's check that the two agree), and checksums."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        def gather() -> Iterator[tuple[str, torch.Tensor]]:
            yield "model.norm.weight", torch.tensor([1.0, 1 + 2**-9], requires_grad=True)
            yield "model.layers.3.mlp.up_proj.weight", torch.ones(2, 2)

        checksums: dict[str, int] = {}
        params = [
            ParamInfo(name="model.norm.weight", shape=(2,)),
            ParamInfo(name="model.layers.3.mlp.up_proj.weight", shape=(2, 2)),
        ]
        source = make_source(params, gather, dtype, checksums)
        meta = source.metadata()
        sent = list(NCCLTrainerWeightTransferEngine._checked_iter(source, meta))
        return (
            [(m.name, str(m.dtype), m.shape) for m in meta],
            [(name, str(t.dtype), t.float().tolist(), t.requires_grad) for name, t in sent],
            checksums,
        )


def test_vllm_takes_our_arguments_and_our_source(start_engine: Callable):
    vllm = start_engine(f"{HERE}:VllmSide")
    expected = {"is_sender": True, "packed": True}
    assert vllm.call("trainer_info", "nccl") == {"backend": "nccl", **expected}
    assert vllm.call("trainer_info", "ipc") == {"backend": "ipc", **expected}
    assert vllm.call("worker_places") == [1, 3, 5]

    declared, sent, checksums = vllm.call("source", "bfloat16")
    assert declared == [
        ("model.norm.weight", "torch.bfloat16", (2,)),
        ("model.layers.3.mlp.up_proj.weight", "torch.bfloat16", (2, 2)),
    ]
    assert sent[0] == ("model.norm.weight", "torch.bfloat16", [1.0, 1.0], False)
    # Summed up as it leaves: two bf16 ones, not the float32 they were.
    assert checksums == {"model.norm.weight": zlib.crc32(np.array([0x3F80] * 2, "<u2").tobytes())}


# --- the receiver's device path, run on CPU with a transport of its own ---------------------------


def rollout_engine_with_memory_transport(**arguments: Any) -> Any:
    """A rollout engine whose vLLM receives weights within the call that announces them.

    vLLM's life cycle (start, update, finish) is that of NCCL and IPC; only the transport differs.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from rock_opd.engines.vllm_rollout import RolloutEngine

    class MemoryReceiver(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            self.place = init_info.rank_offset

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.model.load_weights([(t.name, from_wire(t, dtype="float32")) for t in update_info])

    WeightTransferEngineFactory.register_engine("memory", MemoryReceiver)
    return RolloutEngine(transfer="memory", **arguments)


def test_the_device_path_proves_its_weights_too(start_engine: Callable, tiny_models: Path):
    from transformers import AutoModelForCausalLM

    engine = start_engine(
        f"{HERE}:rollout_engine_with_memory_transport",
        cfg=RolloutConfig(max_prompt_tokens=16, max_new_tokens=16),
        model=str(tiny_models / "student_untied"),
        dtype="float32",
        device="cpu",
        num_real_ids=1024,
        stop_token_ids=(2,),
    )
    client = TransferClient(
        lambda method, args: engine.call(method, *args[0]), num_engines=1, tensor_parallel=1
    )
    place = {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    client.init_weight_transfer_engine(place)

    model = AutoModelForCausalLM.from_pretrained(
        tiny_models / "student_untied", dtype=torch.float32
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(weight.numel())
            )
    wire = to_wire(model.named_parameters())
    sums = Checksums()
    sums.update(wire)

    prompt = Prompt(prompt_id="p", token_ids=np.arange(5, 15, dtype=np.int32))
    asked = [SampleRequest(prompt=prompt, sample_idx=i, seed=i) for i in range(4)]

    def generate() -> list[Any]:
        return engine.call("generate", asked, temperature=1.0, top_p=1.0, max_new_tokens=16)

    def send(version: int, *parts: Any) -> None:
        engine.call("begin_update", version)
        client.start_weight_update()
        for part in parts:
            client.update_weights(part)

    with pytest.raises(SyncError, match=r"no update is open .* call begin_update first"):
        client.start_weight_update()
    send(3, wire[:7])
    with pytest.raises(SyncError, match="v3 began to arrive but were never completed"):
        generate()
    with pytest.raises(SyncError, match=r"v3: \d+ layers are incomplete, first model"):
        client.finish_weight_update()

    send(4, wire[:9], wire[9:])
    with pytest.raises(SyncError, match="v4: the trainer ended before everything was sent"):
        engine.call("end_update", sums.chosen())

    send(5, wire[:9], wire[9:])
    client.finish_weight_update()
    wrong = sums.chosen() | {"lm_head.weight": 1}
    with pytest.raises(SyncError, match=r"v5: tensor lm_head.weight .* in the running model"):
        engine.call("end_update", wrong)
    with pytest.raises(SyncError, match=r"v5: tensor lm_head.weight .* send the whole version"):
        generate()

    send(6, wire)
    client.finish_weight_update()
    assert engine.call("end_update", sums.chosen()) == 6
    for rollout in generate():
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        with torch.no_grad():
            log_q = model(ids[None]).logits[0].log_softmax(-1)
        at = rollout.positions
        expected = log_q[at - 1].gather(1, ids[at, None])[:, 0].numpy()
        np.testing.assert_allclose(rollout.logprobs[at], expected, atol=1e-4)
        assert rollout.policy_version == 6


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "num_gpus"), [("ipc", 1), ("nccl", 2)])
def test_weights_reach_a_gpu_engine_and_are_proved(
    backend: str, num_gpus: int, start_engine: Callable, tiny_models: Path
):
    """The trainer is this process on the last GPU; the engine takes GPU 0 in its own process."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPU")
    from transformers import AutoModelForCausalLM

    from rock_opd.engines.vllm_quirks import prepare_environment

    prepare_environment("cuda", threads=1)
    engine = start_engine(
        "rock_opd.engines.vllm_rollout:RolloutEngine",
        RolloutConfig(max_prompt_tokens=16, max_new_tokens=16, gpu_memory_utilization=0.3),
        model=str(tiny_models / "student"),
        dtype="bfloat16",
        device="cuda",
        num_real_ids=1024,
        stop_token_ids=(2,),
        transfer=backend,
    )
    torch.cuda.set_device(num_gpus - 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_models / "student", dtype=torch.float32)
    model = model.cuda()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sender = DeviceSender(
        backend,
        rank=0,
        params=[ParamInfo(name=n, shape=tuple(p.shape)) for n, p in model.named_parameters()],
        gather=lambda: iter([(n, p.detach()) for n, p in model.named_parameters()]),
        dtype="bfloat16",
        call=lambda method, args: engine.call(method, *args[0]),
        master_addr="127.0.0.1",
        master_port=port,
        num_engines=1,
        tensor_parallel=1,
    )
    for version in (1, 2):
        engine.call("begin_update", version)
        assert engine.call("end_update", sender.send()) == version
    sender.close()

    prompt = Prompt(prompt_id="p", token_ids=np.arange(5, 15, dtype=np.int32))
    asked = [SampleRequest(prompt=prompt, sample_idx=i, seed=i) for i in range(4)]
    rollouts = engine.call("generate", asked, temperature=1.0, top_p=1.0, max_new_tokens=16)
    for rollout in rollouts:
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).cuda()
        with torch.no_grad():
            log_q = model(ids[None]).logits[0].log_softmax(-1)
        at = torch.from_numpy(rollout.positions).cuda()
        expected = log_q[at - 1].gather(1, ids[at, None])[:, 0].cpu().numpy()
        gap = np.abs(rollout.logprobs[rollout.positions] - expected)
        assert gap.mean() < 0.05 and gap.max() < 0.5  # bf16 against float32
