"""schemathesis over the OpenAPI page: what the page allows works, what it does not is refused, and nothing is a 5xx."""

import json
import re

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.waiting import HANG_SECONDS

SESSION = requests.Session()
# What only two fields together can tell, or the model: no schema says it
TOGETHER = re.compile(
    r"stream_options needs|top_logprobs needs|echo with logprobs|json_schema needs a schema|structured_outputs"
    r"|not implemented: leave it out$|maximum context length|outside the vocabulary|n times the prompts|min_tokens"
    r"|Expected `int.*got `float`"  # of 1.0, which JSON Schema takes for an integer
    r"|chat template|the prompt is empty|the prompt has|grammar|regex|schema"
)
CHECKED = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def page(server):
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


schema = schemathesis.pytest.from_fixture("page")


@schema.parametrize()
@hypothesis.settings(max_examples=10, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
def test_the_page_is_what_is_served(case):
    is_right = case.meta is not None and case.meta.generation.mode.is_positive
    if is_right and isinstance(case.body, dict):  # so that what is right does not run for long
        case.body["max_tokens"], case.body["max_completion_tokens"] = 2, 2
        case.body["n"] = min(case.body.get("n") or 1, 2)
    answer = case.call(session=SESSION, timeout=HANG_SECONDS)
    case.validate_response(answer, checks=CHECKED)
    if is_right and answer.status_code == 400:
        message = json.loads(answer.content)["error"]["message"]
        assert TOGETHER.search(message), (message, case.body)
