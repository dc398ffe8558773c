"""An agent of smolagents: it knows two environment variables, and nothing of us.

``appending``: its memory has its turns as they were, without the calls that it writes behind them.
``short``: of prompts for a model with room for 512 characters.
"""

import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel

SHORT = {
    "system_prompt": "python:",
    "planning": {
        "initial_plan": "",
        "update_plan_pre_messages": "",
        "update_plan_post_messages": "",
    },
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "answer:", "post_messages": "answer:"},
}
task, *options = sys.argv[1:]
agent = CodeAgent(
    tools=[],
    model=OpenAIModel("gpt-4o", client_kwargs={"max_retries": 0}),
    prompt_templates=SHORT if "short" in options else None,
    max_steps=1 if "short" in options else 4,
    verbosity_level=LogLevel.OFF,
    step_callbacks=[lambda step: setattr(step, "tool_calls", None)]
    if "appending" in options
    else None,
)
print(agent.run(task))
