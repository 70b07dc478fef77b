"""The processes of a fit: sums, agreement, and how one that fails ends the others."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from distributed_ranks import DEAD, errors, free_port, on_ranks
from dubito.tensors import processes
from dubito.tensors.processes import Processes, join_processes


def test_sums_are_those_of_all_ranks_in_one_all_reduce_for_each_dtype():
    def work(rank):
        with join_processes() as processes:
            leaves = [torch.full((2, 3), rank + 1.0), torch.tensor(rank, dtype=torch.int64), torch.ones(4).mul_(10**rank)]
            processes.sum_(leaves)
            return leaves, processes.collectives, processes.bytes

    for leaves, collectives, sent in on_ranks(3, work):
        assert leaves[0].eq(6).all()
        assert leaves[1].item() == 3
        assert leaves[2].eq(111).all()
        assert (collectives, sent) == (2, 4 * 10 + 8)


def test_sums_in_float64_keep_what_float32_loses():
    def work(rank):
        with join_processes() as processes:
            single, double = torch.tensor([2.0**24]), torch.tensor([2.0**24, 1.0][rank], dtype=torch.float64)
            processes.sum_([single, double], dtype=torch.float64)
            return double.item(), processes.collectives

    assert on_ranks(2, work) == [(2.0**24 + 1, 1)] * 2


def test_flags_travel_with_a_sum_and_alone():
    def work(rank):
        with join_processes() as processes:
            processes.flags = (float(rank == 1), 0.0)
            total = torch.ones(2)
            processes.sum_([total])
            with_sum = processes.sum_of_flags.tolist()
            processes.sum_([])
            return total.tolist(), with_sum, processes.sum_of_flags.tolist()

    assert on_ranks(2, work) == [([2.0, 2.0], [1.0, 0.0], [1.0, 0.0])] * 2


def test_broadcast_gives_the_first_ranks_tensors_of_every_dtype():
    def work(rank):
        with join_processes() as processes:
            leaves = [
                torch.full((2,), float(rank)), torch.tensor(rank == 0), torch.tensor([rank], dtype=torch.int64),
                torch.full((2, 2), rank, dtype=torch.bfloat16).mT, torch.zeros(0),
            ]  # fmt: skip
            processes.broadcast_(leaves)
            return [leaf.double().sum().item() for leaf in leaves], processes.collectives

    assert on_ranks(2, work) == [([0.0, 1.0, 0.0, 0.0, 0.0], 1)] * 2


def test_ranks_that_differ_all_end_with_a_line_that_names_the_value():
    def work(rank):
        with join_processes() as processes:
            processes.agree(version="1", data_length=100 + rank // 2)

    for words in errors(3, work):
        assert words.startswith("ValueError: the processes differ in data length: process 0 has 100 and process 2 101")


def test_an_error_on_one_rank_ends_the_others_with_its_words():
    def work(rank):
        with join_processes() as processes:
            if rank == 1:
                raise KeyError("lost")
            processes.sum_([torch.ones(1)])

    begun = time.monotonic()
    apart = errors(3, work)
    assert time.monotonic() - begun < 30
    assert apart[1] == "KeyError: 'lost'"
    assert apart[0] == apart[2] == "ProcessError: process 1 of 3 has failed: KeyError: 'lost'"


def test_a_killed_rank_ends_the_others_within_30_seconds():
    def work(rank):
        with join_processes() as processes:
            processes.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.monotonic()
            try:
                while True:
                    processes.sum_([torch.ones(1)])
            finally:
                assert time.monotonic() - begun < 30

    apart = errors(3, work)
    assert apart[1] == DEAD
    for words in (apart[0], apart[2]):
        assert words.startswith("ProcessError: another of the 3 processes has ended or does not answer")


def test_the_users_group_is_left_as_it_was():
    def work(rank):
        for _ in range(3):
            with join_processes() as processes:
                processes.barrier()
        total = torch.ones(1)
        distributed.all_reduce(total)
        return total.item()

    assert on_ranks(2, work) == [2.0, 2.0]


def test_a_part_of_the_processes_or_a_mesh_can_be_given():
    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("chains", "data"))
        pair = distributed.new_group([0, 2])
        total = torch.tensor([float(rank)])
        with join_processes(mesh["data"]) as processes:
            processes.sum_([total])
        if rank in (0, 2):
            with join_processes(pair) as processes:
                processes.sum_([total])
        with (
            join_processes(False) as alone,
            pytest.raises(ValueError, match="a DeviceMesh of 4 processes with 2 dimensions"),
            join_processes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("chains", "pipeline"))),
        ):
            pass
        return total.item(), alone.size

    assert on_ranks(4, work) == [(6.0, 1), (1.0, 1), (6.0, 1), (5.0, 1)]


def test_torchruns_variables_make_a_group(monkeypatch):
    port = free_port()

    def work(rank):
        distributed.destroy_process_group()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        total = torch.tensor([rank + 1.0])
        with join_processes() as processes:
            processes.sum_([total])
        return total.item(), processes.size

    assert on_ranks(2, work) == [(3.0, 2)] * 2


def test_a_fit_that_only_some_processes_begin_is_told(monkeypatch):
    monkeypatch.setattr(processes, "JOINING", timedelta(seconds=0.5))

    def work(rank):
        if rank == 0:
            with join_processes():
                pass
        else:
            time.sleep(2)  # it holds the store of the others

    first, second = errors(2, work)
    assert first.startswith(
        "ProcessError: only 1 of 2 processes have begun this fit after 0:00:00.500000: call fit on all of them"
    )
    assert not second


def test_one_process_does_nothing():
    alone, leaf = Processes(), torch.ones(2)
    alone.sum_([leaf])
    alone.broadcast_([leaf])
    alone.barrier()
    alone.agree(seed=1)
    assert leaf.tolist() == [1.0, 1.0]
    assert (alone.collectives, alone.bytes, alone.first) == (0, 0, True)
    with (
        pytest.raises(TypeError, match="distributed must be 'auto', False, a process group or a DeviceMesh; got str"),
        join_processes("yes"),
    ):
        pass
