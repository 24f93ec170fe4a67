"""From the flags of `submit` to a request, and from Slurm's text about a job to what it got."""

from __future__ import annotations

import pytest

from trainwright.errors import UserError
from trainwright.hardware.slurm.cluster import Cluster
from trainwright.launch.slurm.asking import Flags, request_of
from trainwright.launch.slurm.jobs import read_job

# One line (`scontrol -o -d show job`) of each version, cut to what is read and what stands around it.
RUNNING_22 = (
    "JobId=7 JobName=x JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 "
    "SubmitTime=2026-11-20T15:02:49 EligibleTime=2026-11-20T15:02:49 StartTime=2026-11-20T15:04:00 "
    "EndTime=2026-11-20T15:24:00 ReqNodeList=(null) ExcNodeList=(null) NodeList=a-[1-2],mix-1 BatchHost=a-1 NumNodes=3 "
    "TRES=cpu=2,mem=2000M,node=3 JOB_GRES=gpu:a100:6,gpu:v100:2 "
    "Nodes=a-[1-2] CPU_IDs=0-1 Mem=2000 GRES=gpu:a100:2(IDX:0-1) "
    "Nodes=mix-1 CPU_IDs=0-3 Mem=2000 GRES=gpu:a100:2(IDX:0-1),gpu:v100:2(IDX:2-3) MinCPUsNode=2 TresPerNode=gres:gpu:4"
)
PENDING_24 = (
    "JobId=8 JobName=x JobState=PENDING Reason=BeginTime Dependency=(null) Requeue=1 Restarts=1 "
    "SubmitTime=2026-11-20T15:02:49 StartTime=Unknown EndTime=Unknown NodeList= ReqTRES=cpu=1 AllocTRES=(null) "
    "TresPerNode=gres/gpu:2"
)


def test_the_types_of_a_job_are_read_for_each_of_its_nodes() -> None:
    """Nodes with the same share stand together in one host list."""
    job = read_job(RUNNING_22)
    assert (job.state, job.restarts, job.nodes, job.is_live) == ("RUNNING", 2, "a-[1-2],mix-1", True)
    assert job.shares == (("a-[1-2]", ("a100", "a100")), ("mix-1", ("a100", "a100", "v100", "v100")))
    assert job.waited_s == 71


def test_a_waiting_job_has_no_nodes_and_no_times() -> None:
    job = read_job(PENDING_24)
    assert (job.state, job.reason, job.shares, job.waited_s, job.is_live) == ("PENDING", "BeginTime", (), None, True)


def test_what_is_left_out_is_the_gpus_share_of_the_nodes(hardware_cluster: Cluster) -> None:
    """S0-30 to S0-34: one of a node's two GPUs gets half of its cores, 8 at most, and half of its memory."""
    request = request_of(Flags(gres="gpu:a100:1", partition="gpu", nodes=2), hardware_cluster)
    assert (request.gres, request.nodes, request.cpus) == ("gpu:a100:1", 2, 8)
    assert (request.memory_mib, request.time_limit_min) == (128_000, 24 * 60)
    given = Flags(gres="2", partition="gpu", time="1:30:00", memory_gib=3, cpus=2, constraint="ib", account="lab")
    options = request_of(given, hardware_cluster).options()
    wanted = {"--gres=gpu:2", "--time=01:30:00", "--mem=3072M", "--cpus-per-task=2", "--constraint=ib", "--account=lab"}
    assert wanted <= set(options)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (Flags(gres="gpu:a100:3", partition="gpu"), "0 nodes of the partition gpu have"),
        (Flags(gres="gpu:A100:1", partition="gpu"), "a100"),
        (Flags(gres="a100", partition="gpu"), "not understood"),
        (Flags(gres="gpu:0", partition="gpu"), "not understood"),
        (Flags(gres="gpu:1"), "no default partition"),
        (Flags(gres="gpu:1", partition="fast"), "one of gpu, closed, odd"),
        (Flags(gres="gpu:1", partition="gpu", time="2-00:00:00"), "--chain"),
        (Flags(gres="gpu:1", partition="gpu", time="soon"), "not understood"),
        (Flags(gres="gpu:1", partition="gpu", account="a b"), "account"),
    ],
)
def test_a_request_that_nothing_can_meet_is_refused_with_what_there_is(
    hardware_cluster: Cluster, flags: Flags, complaint: str
) -> None:
    with pytest.raises(UserError) as caught:
        request_of(flags, hardware_cluster)
    assert complaint in caught.value.render()
