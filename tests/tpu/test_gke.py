"""The JobSet against rules written here from JobSet's API (v1alpha2), its webhook, and Kubernetes' Job validation."""

import re

import pytest
import yaml

from tests.tpu.conftest import executable
from tpu import gke
from tpu.jobset import to_yaml

BASE = ("run", "--image", "img:1", "--mount", "gs://bkt=/mnt/b")
TRAINING = ("--", "configs/x.py", "--directory", "/mnt/b/runs")
# Field: (type, its own fields or None). A field that is not listed does not exist in the API, or is not for here.
NAMES = {"name": (str, None), "namespace": (str, None), "labels": (dict, None), "annotations": (dict, None)}
EXIT_CODES = {"containerName": (str, None), "operator": (str, None), "values": (list, None)}
POD_RULE = {"action": (str, None), "onExitCodes": (dict, EXIT_CODES)}
CONTAINER = {
    **{"name": (str, None), "image": (str, None), "workingDir": (str, None), "command": (list, None)},
    "env": (list, {"name": (str, None), "value": (str, None)}),
    "ports": (list, {"containerPort": (int, None)}),
    "resources": (dict, {"requests": (dict, None), "limits": (dict, None)}),
    "volumeMounts": (list, {"name": (str, None), "mountPath": (str, None)}),
}
VOLUME = {
    **{"name": (str, None), "emptyDir": (dict, {"medium": (str, None)})},
    "csi": (dict, {"driver": (str, None), "volumeAttributes": (dict, None)}),
    "persistentVolumeClaim": (dict, {"claimName": (str, None)}),
}
TOLERATION = {"key": (str, None), "operator": (str, None), "value": (str, None), "effect": (str, None)}
POD = {
    **{"restartPolicy": (str, None), "terminationGracePeriodSeconds": (int, None), "nodeSelector": (dict, None)},
    **{"serviceAccountName": (str, None), "hostNetwork": (bool, None), "dnsPolicy": (str, None)},
    **{"containers": (list, CONTAINER), "volumes": (list, VOLUME), "tolerations": (list, TOLERATION)},
}
JOB = {
    **{"completionMode": (str, None), "completions": (int, None), "parallelism": (int, None)},
    **{"backoffLimit": (int, None), "podFailurePolicy": (dict, {"rules": (list, POD_RULE)})},
    "template": (dict, {"metadata": (dict, NAMES), "spec": (dict, POD)}),
}
FAILURE_RULE = {"name": (str, None), "action": (str, None), "onJobFailureReasons": (list, None)}
REPLICATED = {"name": (str, None), "replicas": (int, None), "template": (dict, {"spec": (dict, JOB)})}
JOBSET = {
    **{"apiVersion": (str, None), "kind": (str, None), "metadata": (dict, NAMES)},
    "spec": (
        dict,
        {
            "failurePolicy": (dict, {"maxRestarts": (int, None), "rules": (list, FAILURE_RULE)}),
            "replicatedJobs": (list, REPLICATED),
        },
    ),
}
JOB_FAILURES = {
    *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
    *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
}
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def check_fields(value, fields, where="jobset"):
    assert set(value) <= set(fields), f"{where} has no {set(value) - set(fields)}"
    for key, item in value.items():
        kind, inner = fields[key]
        assert type(item) is kind, f"{where}.{key} is {item!r}"
        if inner is not None:
            for part in item if kind is list else [item]:
                check_fields(part, inner, f"{where}.{key}")


def check_rules(jobset):
    """What JobSet's webhook and Kubernetes refuse."""
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    assert DNS_LABEL.fullmatch(name)
    jobs = {job["name"] for job in spec["replicatedJobs"]}
    assert len(jobs) == len(spec["replicatedJobs"])
    assert 0 <= spec["failurePolicy"]["maxRestarts"] < 2**31
    rules = spec["failurePolicy"]["rules"]
    assert len({rule["name"] for rule in rules}) == len(rules)
    for rule in rules:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        assert rule["action"] in ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
        assert set(rule["onJobFailureReasons"]) <= JOB_FAILURES
    for replicated in spec["replicatedJobs"]:
        job = replicated["template"]["spec"]
        pod = job["template"]["spec"]
        longest = f"{name}-{replicated['name']}-{replicated['replicas'] - 1}-{job['completions'] - 1}-abcde"
        assert DNS_LABEL.fullmatch(longest)
        assert replicated["replicas"] * job["parallelism"] < 2**31
        assert job["completionMode"] == "Indexed"
        assert 0 < job["parallelism"] == job["completions"]  # every pod of the slice at once
        assert pod["restartPolicy"] == "Never"  # required by podFailurePolicy
        containers = {container["name"] for container in pod["containers"]}
        for rule in job["podFailurePolicy"]["rules"]:
            assert rule["action"] in ("FailJob", "Ignore", "Count", "FailIndex")
            codes = rule["onExitCodes"]
            assert codes["containerName"] in containers
            assert codes["operator"] in ("In", "NotIn")
            assert codes["values"] == sorted(set(codes["values"]))
            assert 0 not in codes["values"] or codes["operator"] == "NotIn"
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert len(set(volumes)) == len(volumes)
        assert all(len(volume) == 2 for volume in pod["volumes"])  # a name and one source
        for container in pod["containers"]:
            resources = container["resources"]
            assert resources["requests"]["google.com/tpu"] == resources["limits"]["google.com/tpu"]
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            variables = [variable["name"] for variable in container["env"]]
            assert len(set(variables)) == len(variables)
            assert all(isinstance(part, str) for part in container["command"])
        buckets = any("csi" in volume for volume in pod["volumes"])
        annotations = job["template"].get("metadata", {}).get("annotations", {})
        assert (annotations.get("gke-gcsfuse/volumes") == "true") == buckets
        for value in [*pod["nodeSelector"].values(), *annotations.values()]:
            assert type(value) is str


def generate(capsys, *options):
    assert gke.main([*BASE, *options, *TRAINING]) == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    check_fields(jobset, JOBSET)
    check_rules(jobset)
    return jobset


# Slice, accelerator label, nodes, chips a node: GKE's tables of TPU node pools.
POOLS = [
    ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1),
    ("v5e:2x2", "tpu-v5-lite-podslice", 1, 4),
    ("v5e:2x4", "tpu-v5-lite-podslice", 2, 4),
    ("v6e:4x4", "tpu-v6e-slice", 4, 4),
    ("v6e:16x16", "tpu-v6e-slice", 64, 4),
    ("v5p:2x2x1", "tpu-v5p-slice", 1, 4),
    ("v5p:4x4x8", "tpu-v5p-slice", 32, 4),
]


@pytest.mark.parametrize(("tpu", "label", "nodes", "chips"), POOLS)
def test_a_jobset_fits_its_slice(capsys, tpu, label, nodes, chips):
    jobset = generate(capsys, "--tpu", tpu)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["completions"], job["backoffLimit"]) == (1, nodes, 0)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": tpu.partition(":")[2],
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert "tolerations" not in pod


def test_several_slices_on_spot_nodes_with_everything(capsys):
    options = ["--tpu", "v6e:4x4", "--slices", "3", "--spot", "--max-restarts", "7", "--grace", "60"]
    options += ["--queue", "lq", "--namespace", "ns", "--service-account", "sa", "--host-network"]
    options += ["--claim", "filestore=/mnt/nfs", "--env", "A=true", "--cache", "/mnt/nfs/cache"]
    jobset = generate(capsys, *options)
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert jobset["metadata"] == {
        **{"name": "run", "namespace": "ns"},
        **{"labels": {"kueue.x-k8s.io/queue-name": "lq"}, "annotations": exclusive},
    }
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 3
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert (pod["serviceAccountName"], pod["terminationGracePeriodSeconds"]) == ("sa", 60)
    container = pod["containers"][0]
    assert container["env"] == [
        {"name": "JAX_COMPILATION_CACHE_DIR", "value": "/mnt/nfs/cache"},
        {"name": "A", "value": "true"},
    ]
    assert [v.get("csi", {}).get("volumeAttributes", {}).get("bucketName") for v in pod["volumes"]] == [
        None,
        "bkt",
        None,
    ]
    assert pod["volumes"][2]["persistentVolumeClaim"] == {"claimName": "filestore"}


def test_the_command_is_train_py_under_the_fixed_id(capsys, tmp_path):
    odd = ["--sample.prompt", 'it\'s $HOME: `id` "é"\n- x']
    assert gke.main([*BASE, "--tpu", "v5e:4x4", *TRAINING, *odd]) == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == [
        *("bash", "-c", '. tpu/env.sh v5e && exec "$@"', "train", "python", "train.py"),
        *(*TRAINING[1:], *odd, "--name", "run", "--resume", "auto"),
    ]
    assert container["workingDir"] == "/iha_jax"


def test_submitting_hands_the_manifest_to_kubectl(programs, tmp_path, capsys):
    executable(programs / "kubectl", f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/manifest\n')
    jobset = generate(capsys, "--tpu", "v5e:4x4")
    assert gke.main([*BASE, "--tpu", "v5e:4x4", "--submit", *TRAINING]) == 0
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    assert yaml.safe_load((tmp_path / "manifest").read_text()) == jobset
    executable(programs / "kubectl", "#!/bin/sh\ncat >/dev/null\nexit 1\n")
    assert gke.main([*BASE, "--tpu", "v5e:4x4", "--submit", *TRAINING]) == 1
    assert "kubectl delete jobset" in capsys.readouterr().err


def test_the_same_through_cluster_toolkit_and_the_node_pools(capsys):
    options = [*BASE, "--tpu", "v6e:4x4", "--slices", "2", "--cluster", "c", "--location", "us-east5-b"]
    assert gke.main([*options, "--print", "gcluster", *TRAINING]) == 0
    text = capsys.readouterr().out
    assert text.startswith("gcluster \\\n  job \\\n  submit")
    for part in (
        "--compute-type=v6e-16",
        "--num-slices=2",
        "--restarts=20",
        "'--mount=gs://bkt;/mnt/b;rw'",
        "--name run",
    ):
        assert part in text
    assert gke.main([*options, "--spot", "--print", "node-pools", *TRAINING]) == 0
    text = capsys.readouterr().out
    assert text.count("--machine-type=ct6e-standard-4t") == 2
    assert text.count("--tpu-topology=4x4") == text.count("--num-nodes=4") == text.count("--spot") == 2
    assert "run-0" in text
    assert "run-1" in text
    assert gke.main([*BASE, "--tpu", "v6e:4x4", "--print", "gcluster", *TRAINING]) == 1
    assert "needs --cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tpu", "v6e:2x2", "--slices", "2"], "several slices need slices of several hosts, got 2 of v6e:2x2"),
        (["--tpu", "v6e:4x4", "--slices", "0"], "slices and grace must be at least 1"),
        (["--tpu", "v6e:4x4", "--claim", "x=/mnt/b"], "a folder of its own"),
        (["--tpu", "v6e:4x4", "--queue", "L_Q"], "queue must be"),
        (["--tpu", "v6e:4x4", "--cache", "cache"], "--cache must be an absolute path"),
    ],
)
def test_what_the_cluster_would_refuse_is_refused(capsys, options, message):
    assert gke.main([*BASE, *options, *TRAINING]) == 1
    assert message in capsys.readouterr().err


def test_yaml_gives_back_what_went_in():
    tricky = ["yes", "null", "1.0", "", " a", "- x", "k: v", "#", "\n", "é\u2028", "'\"\\", "~", "{}"]
    value = {
        "a": tricky,
        "b/c-d.e": {"x": 1, "y": True, "z": [{"m": "n", "o": [{"p": "q"}, 2]}]},
        "on off": {},
        "e": [],
    }
    assert yaml.safe_load(to_yaml(value)) == value
