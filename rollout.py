"""One question to K trajectories: the multi-turn loop over sampler and tools.

The prompt is rendered once; afterwards ids are only appended. Text the policy wrote is never encoded
again, so what is trained on is exactly what was sampled.
"""

import asyncio
import copy
import logging
from dataclasses import dataclass, field

import config
import protocol
from credit import tree_leaves
from records import Trajectory, Turn, seed_from
from sampler import TOOL_STOP, SamplerError, check_completion


@dataclass
class _Response:
    """The growing response; its four lists keep equal length by construction."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_index: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    opening: str = ""
    tool_calls: int = 0

    def add_sampled(self, completion):
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.loss_mask += [1] * len(completion.token_ids)
        self.turn_index += [len(self.turns)] * len(completion.token_ids)

    def add_observation(self, ids):
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [0] * len(ids)
        self.turn_index += [len(self.turns)] * len(ids)


class Rollout:
    """Runs trajectories of one policy version; knows nothing of rewards."""

    def __init__(self, sampler, tools, tokenizer):
        self.sampler = sampler
        self.tools = tools
        self.tokenizer = tokenizer
        self.system = protocol.system_prompt()

    def prompt(self, query):
        """(ids, opening): the rendered prompt, and the text it already opened for the policy.

        Qwen3.5's template ends in an opened <think>: that token is context, and the transcript starts with it.
        """
        text = protocol.render_prompt(self.tokenizer, self.system, query)
        opening = "<think>\n" if text.endswith("<think>\n") else ""
        return self.tokenizer.encode(text, add_special_tokens=False), opening

    async def run(self, question, k, *, step, version, slot, temperature=None):
        """One finished Trajectory of `question`; an infrastructure failure ends it with finish "error:<kind>".

        temperature: of the sampler, 0 for greedy decoding; None takes config.TEMPERATURE.
        """
        temperature = config.TEMPERATURE if temperature is None else temperature
        prompt_ids, opening = self.prompt(question.query)
        response = _Response(opening=opening)
        seed = seed_from(config.SEED, step, question.id, k)
        finish = None
        deadline = asyncio.get_running_loop().time() + config.TRAJECTORY_DEADLINE
        while finish is None:
            finish = await self._turn(prompt_ids, response, seed, slot, temperature, deadline, f"{question.id}/{k}")
        return _trajectory(question, k, prompt_ids, response, finish, temperature, version, seed)

    async def run_tree(self, question, *, step, version, slot):
        """All leaves of a rollout tree, Trajectories numbered in order of their paths.

        At every state but a final one config.K turns are sampled, each from a seed of its own; what leaves share, they
        share token for token. A branch that ends before is a leaf there. slot: of the first leaf; the others follow.
        Source: MT-GRPO's exact form, K ** (turns - 1) leaves.
        """
        prompt_ids, opening = self.prompt(question.query)
        seed = seed_from(config.SEED, step, question.id, "tree")
        deadline = asyncio.get_running_loop().time() + config.TRAJECTORY_DEADLINE

        async def grow(response, path, slot, leaves):
            """Leaves below one state, `leaves` at most; they may use as many slots from `slot` on."""
            width = 1 if _is_final(response) else config.K
            below = leaves // width

            async def branch(number):
                mine, place = copy.deepcopy(response), (*path, number) if width > 1 else path
                finish = await self._turn(prompt_ids, mine, seed_from(seed, *place), slot + number * below,
                                          config.TEMPERATURE, deadline, f"{question.id}/{place}")  # fmt: skip
                return [(place, mine, finish)] if finish else await grow(mine, place, slot + number * below, below)

            return [leaf for branches in await asyncio.gather(*map(branch, range(width))) for leaf in branches]

        leaves = await grow(_Response(opening=opening), (), slot, most_trajectories())
        return [_trajectory(question, k, prompt_ids, response, finish, config.TEMPERATURE, version, seed, path)
                for k, (path, response, finish) in enumerate(leaves)]  # fmt: skip

    async def _turn(self, prompt_ids, response, seed, slot, temperature, deadline, name):
        """Sample one turn and answer its call; returns the finish reason, None when the trajectory goes on.

        deadline: in the event loop's time. name: of the trajectory, for warnings.
        """
        try:
            async with asyncio.timeout_at(deadline):
                return await self._sample_turn(prompt_ids, response, seed, slot, temperature)
        except TimeoutError:
            return "error:deadline"
        except SamplerError as error:
            logging.getLogger(__name__).warning("%s: %s", name, error)  # the journal has the kind alone
            return f"error:{error.kind}"

    async def _sample_turn(self, prompt_ids, response, seed, slot, temperature):
        turn, room = len(response.turns), config.RESPONSE_TOKENS - len(response.token_ids)
        if room < 1:
            return "max_tokens"
        completion = await self.sampler.sample(
            prompt_ids + response.token_ids,
            max_tokens=room,
            temperature=temperature,
            seed=seed_from(seed, turn, "sample"),
            slot=slot,
        )
        check_completion(completion)
        response.add_sampled(completion)
        text = protocol.strip_end_markers(completion.text)
        if completion.stop_reason == TOOL_STOP and not text.endswith(TOOL_STOP):
            text += TOOL_STOP  # servers may cut the tag from the text; the ids have it
        if turn == 0 and text.lstrip().startswith("<think>"):
            response.opening = ""  # the policy wrote the tag once more: the transcript has it once
        segment = response.opening + text if turn == 0 else text
        call = protocol.find_tool_call(segment) if completion.stop_reason == TOOL_STOP else None
        finish = self._finish(completion, call, response, turn)
        if finish:
            response.turns.append(Turn(text, call))
            return finish
        return None if await self._observe(text, call, response, turn) else "max_tokens"

    def _finish(self, completion, call, response, turn):
        """Why this turn is the last one, or None when a tool call is to be answered."""
        if completion.finish_reason == "length":
            return "max_tokens"
        if call is None:
            return "no_tool_call"
        if response.tool_calls >= config.MAX_TOOL_CALLS:
            return "max_tools"
        if turn == config.MAX_TURNS - 1:
            return "max_turns"
        return None

    async def _observe(self, text, call, response, turn):
        """Run the call and append its output; False (nothing appended) when that would exceed the budget."""
        observation = await self.tools.call(call)
        response.tool_calls += 1
        block = observation.block
        if response.tool_calls == config.MAX_TOOL_CALLS or turn == config.MAX_TURNS - 2:
            block = protocol.budget_notice(block)
        appended = f"\n{block}\n"
        ids = self.tokenizer.encode(appended, add_special_tokens=False)
        if len(response.token_ids) + len(ids) >= config.RESPONSE_TOKENS:
            response.turns.append(Turn(text, call, "", observation.status))
            return False
        response.add_observation(ids)
        response.turns.append(Turn(text, call, appended, observation.status))
        return True


def tree_turns():
    """Turns of the longest trajectory that config allows: the last one may not call a tool."""
    return min(config.MAX_TURNS, config.MAX_TOOL_CALLS + 1)


def most_trajectories():
    """Trajectories of one question, at most: a group's K chains, or the leaves of a full tree."""
    return tree_leaves(config.K, tree_turns()) if config.ROLLOUT_TREE else config.K


def _is_final(response):
    """True when the next turn is the last one whatever it says: a tree does not branch there."""
    return len(response.turns) >= tree_turns() - 1


def _trajectory(question, k, prompt_ids, response, finish, temperature, version, seed, path=()):
    return Trajectory(
        question_id=question.id,
        k=k,
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(response.token_ids),
        loss_mask=tuple(response.loss_mask),
        logprobs=tuple(response.logprobs),
        turn_index=tuple(response.turn_index),
        turns=tuple(response.turns),
        opening=response.opening,
        finish=finish,
        temperature=temperature,
        policy_version=version,
        seed=seed,
        path=path,
    )
