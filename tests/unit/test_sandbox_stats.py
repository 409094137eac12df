"""Counters of the sandbox and the gauges made of them."""

from sandbox.result import RunResult
from sandbox.stats import PoolStats
from toolrl.monitors.sandbox import sandbox_metrics


def counted(*results):
    stats = PoolStats(backend="docker")
    for result in results:
        stats.count(result)
    return stats


def test_runs_are_counted_with_their_times_and_bytes():
    stats = counted(
        RunResult("ok", wall_s=0.5, cpu_s=0.25, queue_s=1.0, stdout_bytes=10, stderr_bytes=2),
        RunResult("timeout", wall_s=1.5, cpu_s=0.75, queue_s=0.0, stdout_bytes=4),
    )
    assert stats.runs == {"ok": 1, "timeout": 1} and stats.suspicions == {}
    assert (stats.wall_s, stats.cpu_s, stats.queue_s, stats.output_bytes) == (2.0, 1.0, 1.0, 16)


def test_what_looks_like_a_way_out_is_counted_by_kind():
    stats = counted(
        RunResult("protocol_violation"),
        RunResult("error", stderr="Traceback (most recent call last):\nPermissionError: [Errno 13] '/proc/1/mem'\n"),
        RunResult("error", stderr="OSError: [Errno 1] Operation not permitted"),
        RunResult("error", stderr="ValueError: PermissionError"),
        RunResult("ok", stderr="PermissionError: caught and printed"),
    )
    assert stats.suspicions == {"protocol_violation": 1, "refused": 2}


def test_a_copy_counts_on_by_itself():
    stats = counted(RunResult("protocol_violation"))
    copy = stats.copy(idle=3)
    stats.count(RunResult("protocol_violation"))
    assert (copy.runs, copy.suspicions, copy.idle, copy.backend) == (
        {"protocol_violation": 1},
        {"protocol_violation": 1},
        3,
        "docker",
    )


def test_gauges_are_totals_of_all_pools_and_means_over_their_runs():
    one = counted(RunResult("ok", wall_s=1.0, cpu_s=0.5, stdout_bytes=30), RunResult("ok"), RunResult("error"))
    two = counted(RunResult("protocol_violation", queue_s=2.0))
    metrics = sandbox_metrics([vars(one.copy(in_use=2)), vars(two.copy(in_use=1))])
    assert metrics["sandbox/runs"] == 4 and metrics["sandbox/in_use"] == 3
    assert metrics["sandbox/run_s_mean"] == 0.25 and metrics["sandbox/cpu_s_mean"] == 0.125
    assert metrics["sandbox/queue_s_mean"] == 0.5 and metrics["sandbox/output_bytes_mean"] == 7.5
    assert metrics["sandbox/status/ok"] == 0.5 and metrics["sandbox/suspicions/protocol_violation"] == 1


def test_boxes_are_those_of_the_hosts_where_there_are_some():
    worker, host = counted(RunResult("ok")), counted(RunResult("ok"), RunResult("ok"))
    metrics = sandbox_metrics([vars(worker)], [vars(host.copy(created=7))])
    assert metrics["sandbox/created"] == 7 and metrics["sandbox/runs"] == 1


def test_no_pool_and_no_run_give_no_division():
    assert sandbox_metrics([])["sandbox/run_s_mean"] == 0.0
    assert sandbox_metrics([vars(PoolStats())])["sandbox/runs"] == 0.0
