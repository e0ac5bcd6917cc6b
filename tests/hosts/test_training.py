"""Runs over several hosts, each with a network, a name and an address of its own: to the exact step, and all end."""

from __future__ import annotations

import pytest
from clusters import CHIEF_PORT, PORT, Hosts, four
from helpers import result_of
from network import why_no_limit, why_no_loss

pytestmark = pytest.mark.cluster
_LONG = pytest.mark.long


@_LONG
@pytest.mark.parametrize("strategy", ["parameter_server", "sync_replicas"])
def test_two_servers_and_two_workers_on_four_hosts(hosts: Hosts, strategy: str) -> None:
    cluster = hosts.cluster(tasks := hosts.network(4), four(tasks), f"strategy={strategy}", "train.steps=300")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    result = ended.result
    assert (result["status"], result["global_step"], result["extra_steps"]) == ("done", 300, 0)
    assert (result["cluster"], result["strategy"], result["workers"]) == ("2ps2w", strategy, 2)
    hosts.report(31, f"{strategy}, 2ps2w on four hosts", "trained", ended)


@_LONG
def test_three_all_reduce_workers_on_three_hosts(hosts: Hosts) -> None:
    network = hosts.network(3)
    tasks = {f"worker:{index}": host for index, host in enumerate(network.hosts)}
    cluster = hosts.cluster(network, tasks, "train.steps=200")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(tasks, 0), cluster.all_said()
    assert (ended.step, ended.result["strategy"], ended.result["workers"]) == (200, "multi_worker_mirrored", 3)
    hosts.report(32, "multi_worker_mirrored, 3w on three hosts", "trained", ended)


@_LONG
@pytest.mark.parametrize(
    "jobs", [("worker:0", "ps:0"), ("worker:0", "ps:0", "chief"), ("worker:0", "worker:1")], ids=" ".join
)
@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_no_task_is_reached_by_a_proxy(
    hosts: Hosts, variable: str, jobs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://10.99.99.99:3128")
    network = hosts.network(len(jobs))
    cluster = hosts.cluster(network, dict(zip(jobs, network.hosts)), "train.steps=100")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(jobs, 0), cluster.all_said()
    assert ended.step == 100


@_LONG
def test_a_chief_of_its_own_on_a_fifth_host(hosts: Hosts) -> None:
    network = hosts.network(5)
    cluster = hosts.cluster(network, {**four(network), "chief": network.hosts[4]}, "train.steps=300")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert ended.step == 300
    hosts.report(33, "a chief of its own, on a fifth host", "trained", ended)


@_LONG
def test_tf_config_on_five_hosts(hosts: Hosts) -> None:
    network = hosts.network(5)
    tasks = {**four(network), "chief": network.hosts[4]}
    cluster = hosts.cluster(network, tasks, "train.steps=300", by_tf_config=True)
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert ended.step == 300
    hosts.report(34, "TF_CONFIG, a chief of its own, on five hosts", "trained", ended)


@_LONG
@pytest.mark.parametrize("shape", ["1ps2w", "2w"])
def test_names_that_stand_for_ipv6_addresses_alone(hosts: Hosts, shape: str) -> None:
    network = hosts.network(3, ipv6=True)
    names = ("worker:0", "worker:1", "ps:0") if "ps" in shape else ("worker:0", "worker:1")
    cluster = hosts.cluster(network, dict(zip(names, network.hosts)), "train.steps=200")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert (ended.step, ended.result["cluster"]) == (200, shape)
    hosts.report(35, f"IPv6 addresses alone, {shape}", "trained", ended)


@_LONG
def test_no_port_is_needed_but_those_that_the_docs_name(hosts: Hosts) -> None:
    if (reason := why_no_loss()) is not None:
        pytest.skip(reason)
    network = hosts.network(4)
    tasks = four(network)
    for task, host in tasks.items():
        network.open_only(host, {PORT, CHIEF_PORT} if task == "worker:0" else {PORT})
    cluster = hosts.cluster(network, tasks, "train.steps=300")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert ended.step == 300
    hosts.report(36, "firewalls: every task's port and cluster.chief_port alone", "trained", ended)


@_LONG
def test_hosts_without_a_common_disk(hosts: Hosts) -> None:
    network = hosts.network(4, shared_disk=False)
    cluster = hosts.cluster(network, four(network), "train.steps=300")
    cluster.start()
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert ended.step == 300
    # The chief's host has the run; the others have nothing.
    assert [host.name for host in network.hosts if list(host.disk.iterdir())] == ["host0"]
    assert result_of(network.hosts[0].disk / "D")["status"] == "done"
    hosts.report(37, "no shared disk", "trained; the chief's host has the run", ended)


LARGE = ("model._target_=user_code.build_large", "+model.megabytes=100", "strategy.placement=partitioned")


@_LONG
@pytest.mark.parametrize("shared_disk", [True, False])
def test_a_model_that_does_not_pass_through_the_chief(hosts: Hosts, shared_disk: bool) -> None:
    network = hosts.network(4, shared_disk=shared_disk)
    for steps in (20, 30):
        cluster = hosts.cluster(network, four(network), *LARGE, f"train.steps={steps}")
        cluster.start()
        ended = cluster.end()
        assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
        assert ended.step == steps
        through_the_chief = "ps:0, ps:1 do not see "
        assert (through_the_chief in ended.console) is not shared_disk
    assert "load  | step     20" in ended.console
    if not shared_disk:
        assert [host.name for host in network.hosts if list(host.disk.iterdir())] == ["host0"]
    where = "on a shared disk" if shared_disk else "no shared disk"
    hosts.report(37, f"100 MB of parameters, {where}, twice", "saved and resumed", ended)


@_LONG
def test_one_percent_of_all_packets_is_lost(hosts: Hosts) -> None:
    if (reason := why_no_loss()) is not None:
        pytest.skip(reason)
    network = hosts.network(4)
    network.drop(1)
    cluster = hosts.cluster(network, four(network), "train.steps=4000")
    cluster.start()
    ended = cluster.end(300)
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert (ended.step, ended.result["extra_steps"], ended.result["restarts"]["worker"]) == (4000, 0, 0)
    hosts.report(38, "1 % of all packets lost, 4000 steps", "trained; no task was lost", ended)


@_LONG
def test_100_mbit(hosts: Hosts) -> None:
    if (reason := why_no_limit()) is not None:
        pytest.skip(reason)
    network = hosts.network(4)
    network.limit(100)
    cluster = hosts.cluster(
        network, four(network), "model._target_=user_code.build_large", "+model.megabytes=1", "train.steps=200"
    )
    cluster.start()
    ended = cluster.end(300)
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert (ended.step, ended.result["extra_steps"]) == (200, 0)
    hosts.report(39, "100 Mbit/s, parameters of 1 MB", "trained", ended)


@_LONG
def test_5_ms_each_way(hosts: Hosts) -> None:
    network = hosts.network(4, delay_secs=0.005)
    cluster = hosts.cluster(network, four(network), "train.steps=300")
    cluster.start()
    ended = cluster.end(300)
    assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
    assert (ended.step, ended.result["extra_steps"]) == (300, 0)
    hosts.report(40, "5 ms each way", "trained", ended)


@_LONG
def test_prefetch_hides_5_ms_each_way(hosts: Hosts) -> None:
    network = hosts.network(4, delay_secs=0.005)
    rates, staleness = dict[str, float](), dict[str, float]()
    for prefetch, size in (("0", "16"), ("2", "16"), ("auto", "auto")):
        options = f"strategy.prefetch={prefetch}", f"train.steps_per_call={size}", "train.steps=1600"
        options += (f"run.dir=D{prefetch}",)
        cluster = hosts.cluster(network, four(network), *options)
        cluster.start()
        ended = cluster.end(300)
        assert ended.codes == dict.fromkeys(cluster.tasks, 0), cluster.all_said()
        result = result_of(network.hosts[0].disk / f"D{prefetch}")
        assert result["global_step"] == 1600
        rates[prefetch], staleness[prefetch] = result["steps_per_second"], result["gradients"]["staleness_mean"]
    assert min(staleness["2"], staleness["auto"]) > staleness["0"] + 1
    assert min(rates["2"], rates["auto"]) > 1.3 * rates["0"]
    times = f"{rates['2'] / rates['0']:.1f}, auto: {rates['auto'] / rates['0']:.1f} times as fast"
    hosts.report(40, f"5 ms each way, prefetch=2: {times}", "trained", ended)
