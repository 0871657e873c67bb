"""The offline task of the tests with lm-evaluation-harness: one document of local text, scored whole."""
import json

NAME = "wush_text"
# By how much, relatively, two bits must move a perplexity, up or down on so short a text; another order of f32 sums moves one by some 1e-6.
MOVED = 1e-4
TASK = """
task: wush_text
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
"""


def write(folder, text, characters):
    """The task over the first characters of a file, for `--include_path folder --tasks wush_text`."""
    data = folder / "text.json"
    data.write_text(json.dumps({"text": text.read_text()[:characters]}) + "\n")
    (folder / f"{NAME}.yaml").write_text(TASK.format(data=data))


def result(out):
    """Byte perplexity, and the harness's configuration, of the one run that wrote to `out`."""
    (path,) = out.rglob("results_*.json")
    found = json.loads(path.read_text())
    return found["results"][NAME]["byte_perplexity,none"], found["config"]
