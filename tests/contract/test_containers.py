"""containers/Dockerfile, as far as it can be checked where no docker daemon runs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import typer.main
import yaml

from diffusion_runtime.cli.flag_syntax import rewrite_dotted_flags
from diffusion_runtime.cli.verbs import program

ROOT = Path(__file__).parents[2]
FILE = ROOT / "containers" / "Dockerfile"
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "VOLUME", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) with continued lines joined and comments left out."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, text) for name, text in pairs]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    allowed = [
        line.removeprefix("!") for line in Path(f"{FILE}.dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    stages = [text.rpartition(" AS ")[2] for name, text in instructions() if name == "FROM" and " AS " in text]
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    for text in (text for name, text in instructions() if name == "COPY"):
        words = shlex.split(text)
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert source in allowed


def test_it_runs_the_command_as_another_user_than_root_with_a_cache_volume() -> None:
    last = [(name, text) for name, text in instructions()]
    last = last[max(index for index, (name, _) in enumerate(last) if name == "FROM") :]
    values = dict(last)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert json.loads(values["ENTRYPOINT"])[0] in project["scripts"]
    assert values["USER"] not in ("root", "0")
    (volume,) = json.loads(values["VOLUME"])
    assert re.search(rf"HF_HOME={volume}/", values["ENV"])
    python = re.search(r"PYTHON_VERSION=(\S+)", FILE.read_text())
    assert python is not None
    assert f"Programming Language :: Python :: {python[1]}" in project["classifiers"]


# What of KubeRay's CRDs (ray.io/v1) the manifest uses, closed: a field that is not here is a slip. The whole file was
# checked once against the CRDs of KubeRay as of August 2026.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
POD: dict[str, Any] = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "additionalProperties": False,
            "properties": {
                "containers": {"type": "array", "minItems": 1},
                "volumes": {"type": "array"},
                "terminationGracePeriodSeconds": {"type": "integer"},
            },
        }
    },
}
HEAD = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {"rayStartParams": TEXTS, "template": POD},
}
WORKER = {
    **HEAD,
    "required": ["groupName", "rayStartParams", "template"],
    "properties": {
        **HEAD["properties"],
        "groupName": {"type": "string"},
        **{name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")},
    },
}
CLUSTER = {
    "type": "object",
    "required": ["headGroupSpec"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": {"type": "string"},
        "authOptions": {"properties": {"mode": {"enum": ["disabled", "token"]}}},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "headGroupSpec": HEAD,
        "workerGroupSpecs": {"type": "array", "items": WORKER},
    },
}
JOB = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "entrypoint": {"type": "string"},
        "backoffLimit": {"type": "integer"},
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "rayClusterSpec": CLUSTER,
    },
}


def test_the_manifest_for_kuberay_fits_its_schema_this_package_and_itself() -> None:
    documents = list(yaml.safe_load_all((ROOT / "containers" / "kuberay.yaml").read_text()))
    assert [each["kind"] for each in documents] == [
        "PersistentVolumeClaim",
        "Secret",
        "RayCluster",
        "Service",
        "RayJob",
    ]
    claim, secret, served, service, job = documents
    jsonschema.validate(served["spec"], CLUSTER)
    jsonschema.validate(job["spec"], JOB)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for cluster in (served["spec"], job["spec"]["rayClusterSpec"]):
        assert f"=={cluster['rayVersion'].rpartition('.')[0]}.*" in extras["ray"][0]
        assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            volumes = {each["name"]: each for each in pod["volumes"]}
            assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
            (container,) = pod["containers"]
            mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
            named = [*container.get("args", ()), *(each["value"] for each in container["env"])]
            paths = re.findall(r"(?<=[ =])/[\w./-]+|^/[\w./-]+", " ".join(named))
            assert paths
            assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths), paths
            key = volumes.get("keys", {}).get("secret", {}).get("secretName")
            assert key in (None, secret["metadata"]["name"])
        for worker in cluster["workerGroupSpecs"]:
            assert worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert service["spec"]["selector"]["ray.io/cluster"] == served["metadata"]["name"]
    (serving,) = served["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in serving["ports"]}
    assert ports[service["spec"]["ports"][0]["targetPort"]] == 8000, "the default of --port"
    serve_words = serving["args"][0].partition("exec ")[2]
    given = parsed(serve_words)
    assert (given["ray"], given["model"], given["port"]) == ("auto", "flux.1-dev", ports["http"])
    assert given["replicas"] == f"0..{served['spec']['workerGroupSpecs'][0]['maxReplicas']}"
    # Clients call the server by the name of the service.
    assert given["allowed_host"] == [service["metadata"]["name"]]
    (key_file,) = [each["mountPath"] for each in serving["volumeMounts"] if each["name"] == "keys"]
    assert given["api_key_file"] in [f"{key_file}/{name}" for name in secret["stringData"]]
    given = parsed(job["spec"]["entrypoint"])
    largest = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]
    assert (given["ray"], given["replicas"], given["resume"]) == ("auto", f"1..{largest}", True)


def parsed(line: str) -> dict[str, Any]:
    """Return what a command line gives to its verb."""
    program_name, verb, *words = rewrite_dotted_flags(shlex.split(line))
    assert program_name == "diffusion-runtime"
    command = typer.main.get_command(program(verb))
    return dict(command.commands[verb].make_context(verb, words).params)  # type: ignore[attr-defined]
