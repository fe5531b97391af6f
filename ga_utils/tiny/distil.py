"""How is an attention teacher turned into a Llamba student? In the stages of MOHAWK, which the Llamba
models use too.

    matrix orientation       each student head's mixer matrix, (C B^T) * decay, is fitted to the attention
    matrix of the
                             teacher's head of the same layer and number
    hidden-state alignment   each mixer's output, then each block's output, is fitted to the teacher's on the
                             *teacher's* input of that layer: the layers are trained apart, no error travels
    end to end               the whole student is fitted to the teacher's next-word distributions and to the
    answers

Weight transfer comes first here: embeddings, norms, MLPs and the language-model head are the teacher's, and
the student has as many heads of the same width, so that one layer or one head can be grafted. After
hidden-state alignment the student is called *unaligned*: its layers do what the teacher's do, one by one,
but were never trained together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from ga_utils.llamba import LlambaConfig, LlambaForCausalLM
from ga_utils.llamba_mixer import segment_sums
from ga_utils.tiny.lessons import Batch
from ga_utils.tiny.training import OTHER_WORDS, answer_loss


def student_of(teacher: LlamaForCausalLM, d_state: int = 32) -> LlambaForCausalLM:
    """A Llamba with the teacher's embeddings, norms, MLPs and head; its mixers are drawn at random."""
    c = teacher.config
    student = LlambaForCausalLM(
        LlambaConfig(
            vocab_size=c.vocab_size,
            d_model=c.hidden_size,
            n_layer=c.num_hidden_layers,
            tie_embeddings=False,
            pad_vocab_size_multiple=1,
            norm_epsilon=c.rms_norm_eps,
            initializer_range=0.08,
            pad_token_id=c.pad_token_id,
            mlp_cfg={"intermediate_size": c.intermediate_size},
            ssm_cfg={
                "d_state": d_state,
                "n_v_heads": c.num_attention_heads,
                "n_qk_heads": c.num_attention_heads,
                "expand": c.num_attention_heads * c.head_dim // c.hidden_size,
                "chunk_size": 64,
            },
        )
    )
    student.backbone.embedding.load_state_dict(teacher.model.embed_tokens.state_dict())
    student.backbone.final_layernorm.load_state_dict(teacher.model.norm.state_dict())
    student.lm_head.load_state_dict(teacher.lm_head.state_dict())
    for mine, theirs in zip(student.backbone.layers, teacher.model.layers, strict=True):
        for part in ("mlp", "input_layernorm", "post_attention_layernorm"):
            getattr(mine, part).load_state_dict(getattr(theirs, part).state_dict())
        # the teacher's values are a start for the student's, which go through the same output projection
        with torch.no_grad():
            width = mine.mixer.d_inner
            mine.mixer.in_proj.weight[:width] = theirs.self_attn.v_proj.weight
            mine.mixer.out_proj.weight.copy_(theirs.self_attn.o_proj.weight)
            mine.mixer.conv1d.weight[:width] = 0.0
            mine.mixer.conv1d.weight[:width, :, -1] = 1.0
            mine.mixer.conv1d.bias[:width] = 0.0
            mine.mixer.z_bias.fill_(1.28)  # silu(1.28) is about 1: the gate starts open
            mine.mixer.D.zero_()
    return student


class _Watch:
    """What the teacher's layers saw and gave in its last forward: inputs, mixer outputs, attention, block
    outputs."""

    def __init__(self, teacher: LlamaForCausalLM):
        self.teacher = teacher
        self.mixed: list[Tensor] = []
        self.attention: list[Tensor] = []

    def _keep(self, module: nn.Module, args: tuple, out: tuple) -> None:
        self.mixed.append(out[0])
        self.attention.append(out[1])

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> list[Tensor]:
        """Each layer's input and, at the end, the last layer's output, before the final norm."""
        self.mixed, self.attention = [], []
        states: list[Tensor] = []
        handles = [
            layer.register_forward_pre_hook(
                lambda m, a, k: states.append(a[0] if a else k["hidden_states"]), with_kwargs=True
            )
            for layer in self.teacher.model.layers
        ]
        handles.append(self.teacher.model.norm.register_forward_pre_hook(lambda m, a: states.append(a[0])))
        # only for this forward: hooks that stay would go on collecting in every later stage
        handles += [layer.self_attn.register_forward_hook(self._keep) for layer in self.teacher.model.layers]
        try:
            self.teacher(ids)
        finally:
            for h in handles:
                h.remove()
        return states


def normalised_error(mine: Tensor, theirs: Tensor, real: Tensor) -> Tensor:
    """Squared error over the real positions [b, t], as a share of the target's variance there."""
    a, b = mine[real], theirs[real]
    return (a - b).square().sum() / (b - b.mean(0)).square().sum().clamp_min(1e-8)


def layer_losses(teacher: LlamaForCausalLM, what: str) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of a stage that trains all layers apart, summed over layers.

    what: "matrices" (matrix orientation), "mixers" or "blocks" (the two halves of hidden-state alignment).
    """
    watch = _Watch(teacher)

    def loss(student: nn.Module, lesson: Batch) -> Tensor:
        return torch.stack(layer_errors(student, watch, lesson, what)).sum()

    return loss


def layer_errors(student: nn.Module, watch: _Watch, lesson: Batch, what: str) -> list[Tensor]:
    """One number a layer: the error of what the stage fits, on the teacher's own inputs."""
    states = watch(lesson.ids)
    real = lesson.answers | lesson.other
    found = []
    for i, block in enumerate(student.backbone.layers):
        if what == "blocks":
            moved = states[i + 1] - states[i]  # what the block adds: the stream itself would hide its error
            found.append(normalised_error(block(states[i]) - states[i], moved, real))
            continue
        normed = block.input_layernorm(states[i])
        if what == "mixers":
            found.append(normalised_error(block.mixer(normed), watch.mixed[i], real))
            continue
        _, B, C, log_decay, _ = block.mixer.project(normed)
        B, C, log_decay = (v.transpose(1, 2) for v in (B, C, log_decay))
        matrix = (C @ B.mT) * segment_sums(log_decay).exp()
        rows = real[:, None, :, None]
        error = ((matrix - watch.attention[i]).square() * rows).sum((-1, -2))
        found.append((error / (watch.attention[i].square() * rows).sum((-1, -2))).mean())
    return found


def end_to_end_loss(teacher: LlamaForCausalLM) -> Callable[[nn.Module, Batch], Tensor]:
    """The answers' loss plus the divergence from the teacher's next-word distributions, weighted alike."""

    def loss(student: nn.Module, lesson: Batch) -> Tensor:
        with torch.no_grad():
            target = F.log_softmax(teacher(lesson.ids).logits, -1)
        logits = student(lesson.ids).logits
        each = F.kl_div(F.log_softmax(logits, -1), target, log_target=True, reduction="none").sum(-1)
        soft = each[lesson.answers].mean() + OTHER_WORDS * each[lesson.other].mean()
        return soft + answer_loss(logits, lesson)

    return loss
