"""Two-digit additions with a calculator: the model has to call the tool, read the result and answer with it."""

import ast
import random

import molt_sdk as molt

OPERATORS = {ast.Add: float.__add__, ast.Sub: float.__sub__, ast.Mult: float.__mul__, ast.Div: float.__truediv__}
CALL = molt.ToolCall(id="1", type="function", function={"name": "calculator", "arguments": '{"expression": "12 + 30"}'})
EXAMPLE = [{"role": "user", "content": "What is 12 + 30?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
EXAMPLE += [{"role": "tool", "tool_call_id": "1", "content": "42"}, {"role": "assistant", "content": "42"}]


def value(node: ast.expr) -> float:
    """What is neither an operation nor a number raises, and the model sees the error."""
    operands = [value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return OPERATORS[type(node.op)](*operands) if isinstance(node, ast.BinOp) else float(ast.unparse(node))


@molt.environment(max_turns=3)
class Calculator:
    """One addition per episode. The held-out pairs, those whose difference is a multiple of 5, are never trained on."""

    @staticmethod
    def tasks(split: str = "train", seed: int = 0) -> list[molt.Task]:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if ((a - b) % 5 == 0) == (split == "eval")]
        return [molt.Task(f"What is {a} + {b}?", str(a + b)) for a, b in random.Random(seed).sample(pairs, len(pairs))]

    @molt.tool
    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression such as "12 * 7"."""
        return f"{value(ast.parse(expression, mode='eval').body):.12g}"

    @molt.reward(weight=0.2)
    def called(self, trajectory: molt.Trajectory) -> bool:
        return [run.message["content"] for run in trajectory.tool_executions[:1]] == [self.task.answer]

    @molt.reward(weight=0.8)
    def correct(self, trajectory: molt.Trajectory) -> bool:
        return trajectory.text.strip() == self.task.answer


@molt.policy
async def solver(env: Calculator, model: molt.Model) -> None:
    messages = [*EXAMPLE, {"role": "user", "content": env.task.prompt}]
    await model.run(messages, tools=env, system="When you get the result, reply with just the number.", max_tokens=48)
