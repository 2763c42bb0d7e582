"""All answers to a schedule's two questions for a small chain, tried one by one over sets of live storages."""

from __future__ import annotations

import functools
import itertools
import math

SAVE, KEEP, DROP = "save", "keep", "drop"


def fastest_by_memory(chain, head_bytes, top):
    """The least extra seconds with 0, 1, … `top` bytes."""
    front = _Search(chain, head_bytes).front()
    return [min((seconds for peak, seconds in front if peak <= memory), default=math.inf) for memory in range(top + 1)]


class _Search:
    def __init__(self, chain, head_bytes):
        self.chain, self.head_bytes, self.size = chain, head_bytes, len(chain)
        self.back = functools.cache(self._back)

    def output(self, call):
        given = self.chain[call].output_bytes
        follower = call + 1 if call + 1 < self.size else call
        return self.chain[follower].input_bytes if given is None else given

    def gradient(self, call):  # of the output; the last output is alive, too
        return 2 * self.output(call) if call + 1 == self.size else self.chain[call + 1].input_bytes

    def live(self, kept, saved, options, *, needs_input_of=None):
        total = 0
        for call, layer in enumerate(self.chain):
            holds_input = call in kept or call == needs_input_of
            if call in saved:
                is_inside = layer.input_saved and layer.saved_bytes >= layer.input_bytes
                total += layer.saved_bytes
                holds_input &= not is_inside
            total += layer.input_bytes * holds_input
            option = options[call]
            if option is not None:
                total += option.kept_bytes - (option.shared_bytes if call in saved else 0)
        return total

    def front(self):
        ways = [
            [(SAVE, None), *itertools.product((KEEP, DROP), (None, *(layer.menu if layer.saved_bytes else ())))]
            for layer in self.chain
        ]
        found = []
        for answers in itertools.product(*ways):
            if any(answer[0] == DROP and (i == 0 or answers[i - 1][0] == SAVE) for i, answer in enumerate(answers)):
                continue  # it would keep its input, and that is tried anyway
            if not all(self.is_one_way(segment) for segment in segments(answers)):
                continue
            kept, saved, options, peak = set(), set(), [None] * self.size, 0
            for call, (action, option) in enumerate(answers):
                layer = self.chain[call]
                options[call] = option
                probing = self.live(kept, {*saved, call}, options, needs_input_of=call)
                peak = max(peak, probing + layer.forward_temp_bytes + self.output(call))
                if action == SAVE:
                    saved.add(call)
                elif action == KEEP:
                    kept.add(call)
            peak = max(peak, self.live(kept, saved, options) + self.output(self.size - 1) + self.head_bytes)
            state = self.size - 1, frozenset(kept), frozenset(saved), tuple(options)
            found += [(max(peak, later), seconds) for later, seconds in self.back(*state)]
        return pareto(found)

    def _back(self, target, kept, saved, options):
        """Peak and extra seconds of all ways to bring back and run backward what is from `target` downwards."""
        if target < 0:
            return [(0, 0.0)]
        layer, found = self.chain[target], []
        below = (None,) if target in saved or not layer.saved_bytes else self.walks(target, kept)
        for actions in below:
            now_kept, now_saved, peak, seconds = set(kept), set(saved), 0, 0.0
            if actions is not None:
                first = target - len(actions) + 1
                for call, action in enumerate(actions, first):
                    costs = options[call] or self.chain[call]
                    (now_saved if action == SAVE else now_kept if action == KEEP else set()).add(call)
                    running = self.live(now_kept, now_saved, options, needs_input_of=call)
                    running += self.gradient(target) + self.chain[call].forward_temp_bytes
                    seconds += costs.forward_s
                    if call == target:
                        seconds -= costs.skipped_s
                    if call < target or not costs.skipped_s:
                        running += self.output(call)
                    peak = max(peak, running)
            gradients = self.gradient(target) + layer.input_bytes + layer.backward_temp_bytes
            peak = max(peak, self.live(now_kept, now_saved, options) + gradients)
            rest = (*options[:target], None, *options[target + 1 :])
            state = target - 1, frozenset(now_kept - {target}), frozenset(now_saved - {target}), rest
            found += [(max(peak, later), seconds + more) for later, more in self.back(*state)]
        return pareto(found)

    def is_one_way(self, segment):
        """Whether its calls are dropped by the same entry of their menus, if they have that."""
        ways = [None, *range(max(len(layer.menu) for layer in self.chain))]
        return any(all(option == self.entry(call, way) for call, (_, option) in segment) for way in ways)

    def entry(self, call, way):
        layer = self.chain[call]
        return layer.menu[way] if way is not None and way < len(layer.menu) and layer.saved_bytes else None

    def walks(self, target, kept):
        first = max(call for call in kept if call <= target)
        return [(*actions, SAVE) for actions in itertools.product((SAVE, KEEP, DROP), repeat=target - first)]


def segments(answers):
    """The dropped calls from one kept input to the next."""
    found = []
    for call, answer in enumerate(answers):
        if answer[0] == KEEP:
            found.append([])
        if answer[0] != SAVE:
            found[-1].append((call, answer))
    return found


def pareto(points):
    front = []
    for peak, seconds in sorted(set(points)):
        if not front or seconds < front[-1][1]:
            front.append((peak, seconds))
    return front
