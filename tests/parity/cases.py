"""The parity table: plans of every kind, as small as they can be."""

from dataclasses import dataclass, replace
from math import prod
from typing import get_args

from weft.config.optim_sections import REHEARSAL_EPS, AdamWConfig, CosineSchedule
from weft.diagnose.verify import Rehearsal
from weft.models.registry import FAMILIES
from weft.plan.layout import At
from weft.plan.mesh import Mesh
from weft.plan.model import ExpertsSpec, LatentSpec
from weft.plan.plan import (
    PipelinePlan,
    Plan,
    Recompute,
    ScheduleName,
    Scores,
    StagePlan,
    ZeroLevel,
)
from weft.precision.roles import Tier
from weft.schedules.registry import SCHEDULES

NUM_LAYERS = 4
STEPS = 2
"""What the first makes of parameters and moments shows in the second; rows on the strict backend,
and rules of optimizers, take three."""
OPTIM = AdamWConfig(
    lr=0.01, eps=REHEARSAL_EPS, max_grad_norm=0.5, schedule=CosineSchedule(warmup=0)
)


@dataclass(frozen=True)
class Case:
    """A plan, pipeline by pipeline: the data-parallel ranks and the layers of each stage."""

    name: str
    shares: tuple[int, ...]
    microbatch: int = 2
    dp: tuple[tuple[int, ...], ...] = ()
    """Data-parallel size of each mesh of each pipeline; one mesh of one rank by default."""
    tp: tuple[tuple[int, ...], ...] = ()
    """Tensor-parallel size likewise; 1 by default."""
    cp: tuple[tuple[int, ...], ...] = ()
    """Context-parallel size likewise; 1 by default."""
    ep: tuple[tuple[int, ...], ...] = ()
    """Expert-parallel size likewise; 1 by default."""
    tp_outer: bool = False
    """Meshes name their tensor-parallel axis first, and their ranks downwards."""
    num_layers: int = NUM_LAYERS
    layers: tuple[tuple[float, ...], ...] = ()
    """Layers of each stage of each pipeline, halves where one is cut; all in one stage by
    default."""
    schedule: ScheduleName = "1f1b"
    in_flight: tuple[int, ...] = ()
    """Of every pipeline, by position; as many as its schedule needs by default."""
    precision: str = "fp64"
    lists: tuple[tuple[str, ...], ...] = ()
    """Of each pipeline, by position; those of its schedule by default."""
    recompute: Recompute = "off"
    zero: ZeroLevel = 0
    zeros: tuple[ZeroLevel, ...] = ()
    """By stage of each pipeline, where they differ."""
    passes: int = 1
    pieces: int = 1
    """Of stages with tensor parallelism."""
    head_ways: int = 1
    """Of stages with context parallelism."""
    expert_ways: int = 0
    """Of stages with expert parallelism."""
    expert_pieces: int = 1
    expert_shares: tuple[int, ...] = ()
    """Of stages with so many places along the axis."""
    width_shares: tuple[int, ...] = ()
    """Likewise."""
    expert_tier: Tier = "device"
    expert_layers: int = 2
    """Of those where experts are kept elsewhere."""
    expert_places: tuple[tuple[At, ...], ...] = ()
    """Of all layers, in the one stage."""
    scores: Scores = "blocks"
    """Of those where keys go from rank to rank."""
    by_work: bool = False
    """Those ranks have the tokens of a sample by the work of its documents."""
    family: str = "llama"
    order: tuple[int, ...] = ()
    """Numbers of the ranks, where they are not given out in order."""
    tied: bool = False
    experts: ExpertsSpec | None = None
    """Of llama; none by default."""
    latent: LatentSpec | None = None
    """Of llama: attention through low ranks."""
    norms_all_heads: bool = False
    """Of llama: queries and keys are normed so."""
    dropout: float = 0.0
    seq_len: int = 16
    domains: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks that fast links join; all in one by default."""
    num_kv_heads: int = 4
    """Of llama; of 8 heads in all."""
    sample_shares: tuple[tuple[int, ...], ...] = ()
    """Of every mesh of each pipeline; alike by default."""
    state_shares: tuple[tuple[int, ...], ...] = ()
    border: str = ""
    """What borders between meshes are cast to."""
    gather: str = ""
    """What weights are rounded to before they are gathered."""
    heads: tuple[tuple[int, ...], ...] = ()
    """Of each pipeline: rows of the head by mesh, with 0 for none; the last stage's by default."""

    def shallow(self) -> "Case":
        """With two layers where one stage has all, and none is fetched or placed one by one: each
        hands on to the next what any other would."""
        one_by_one = 3 in (self.zero, *self.zeros) or self.expert_tier != "device"
        if self.layers or self.expert_places or one_by_one:
            return self
        return replace(self, num_layers=2)

    def plan(self) -> Plan:
        pipelines, first = [], 0
        for number, share in enumerate(self.shares):
            dp = self.dp[number] if self.dp else (1,)
            layers = self.layers[number] if self.layers else (self.num_layers,)
            meshes = []
            tp = self.tp[number] if self.tp else (1,) * len(dp)
            cp = self.cp[number] if self.cp else (1,) * len(dp)
            ep = self.ep[number] if self.ep else (1,) * len(dp)
            for each in zip(dp, ep, cp, tp, strict=True):
                sizes = dict(zip(("dp", "ep", "cp", "tp"), each, strict=True))
                places = range(first, first + prod(each))
                ranks = tuple(self.order[n] if self.order else n for n in places)
                if self.tp_outer:
                    ranks, sizes = ranks[::-1], dict(reversed(sizes.items()))
                said = {"ep": self.expert_shares, "tp": self.width_shares}
                fit = {axis: each for axis, each in said.items() if len(each) == sizes[axis]}
                meshes.append(Mesh.of(ranks, **sizes).with_shares(**fit))
                first = places.stop
            if self.schedule in ("zb-v", "dualpipe-v"):
                meshes += meshes[::-1]
            elif self.schedule == "interleaved":
                meshes *= 2
            stages = [
                StagePlan(
                    mesh=mesh,
                    layers=(sum(layers[:s]), sum(layers[: s + 1])),
                    precision=self.precision,
                    recompute=self.recompute,
                    zero=self.zeros[s] if self.zeros else self.zero,
                    passes=self.passes,
                    pieces=self.pieces if mesh.size("tp") > 1 else 1,
                    head_ways=min(self.head_ways, mesh.size("cp")),
                    expert_ways=self.expert_ways if mesh.size("ep") > 1 else 0,
                    expert_pieces=self.expert_pieces if mesh.size("ep") > 1 else 1,
                    expert_tier=self.expert_tier,
                    expert_layers=self.expert_layers,
                    expert_places=self.expert_places,
                    scores=self.scores if mesh.size("cp") > self.head_ways else "blocks",
                    sample_shares=self.sample_shares[number] if self.sample_shares else (),
                    state_shares=self.state_shares[number] if self.state_shares else (),
                    border=self.border if mesh != after else "",
                    gather=self.gather,
                )
                for s, (mesh, after) in enumerate(
                    zip(meshes, [*meshes[1:], meshes[-1]], strict=True)
                )
            ]
            rows = self.heads[number] if self.heads else ()
            parts = [
                replace(
                    stages[[stage.mesh for stage in stages].index(mesh)],
                    layers=(self.num_layers, self.num_layers),
                    head_rows=(sum(rows[:n]), sum(rows[: n + 1])),
                    recompute="off",
                    passes=1,
                    pieces=1,
                )
                for n, mesh in enumerate(dict.fromkeys(meshes) if rows else ())
                if rows[n]
            ]
            pipelines.append(
                PipelinePlan(
                    stages=(*stages, *parts),
                    samples=share,
                    microbatch=self.microbatch,
                    schedule=self.schedule,
                    in_flight=self.in_flight,
                    lists=self.lists[number] if self.lists else (),
                )
            )
        return Plan(num_layers=self.num_layers, pipelines=tuple(pipelines), domains=self.domains)

    def rehearsal(self) -> Rehearsal:
        family = FAMILIES[self.family]
        row = next(iter(family.sizes.values()))
        heads = {"num_heads": 8, "num_kv_heads": self.num_kv_heads if self.family == "llama" else 8}
        spec = replace(row, **heads).reduced()
        spec = replace(spec, num_layers=self.num_layers, dropout=self.dropout)
        if self.latent is not None:
            spec = replace(spec, latent=self.latent, num_kv_heads=spec.num_heads).reduced()
        if self.family == "llama":
            norms = self.norms_all_heads
            spec = replace(
                spec, tied=self.tied, experts=self.experts, qk_norm=norms, norms_all_heads=norms
            )
        return Rehearsal(spec=spec, optim=OPTIM, seq_len=self.seq_len, seed=5)


ONE_BY_ONE = [
    Case("accumulation", shares=(6,), microbatch=2),
    Case("recompute", shares=(6,), microbatch=6, recompute="full"),
    Case("pipelines-2-1", shares=(4, 2)),
    Case("pipelines-3-1-2", shares=(3, 1, 2), microbatch=1),
    Case("mesh-dp2", shares=(6,), dp=((2,),)),
    Case("mesh-dp4-idle-rank", shares=(6,), dp=((4,),), microbatch=3),
    Case("unlike-pipelines", shares=(4, 2), dp=((2,), (1,))),
    Case("tied", shares=(4, 2), tied=True),
    Case("gpt2", shares=(4, 2), family="gpt2"),
    Case("gpt2-dropout", shares=(4, 2), family="gpt2", dropout=0.3),
    Case("pp2-gpipe", shares=(6,), dp=((1, 1),), layers=((2, 2),), schedule="gpipe"),
    Case("pp2-1f1b", shares=(6,), dp=((1, 1),), layers=((2, 2),)),
    Case("pp3-uneven", shares=(6,), dp=((1, 1, 1),), layers=((1, 3, 0),), microbatch=1),
    Case("pp3-empty-middle", shares=(6,), dp=((1, 1, 1),), layers=((0, 0, 4),)),
    Case(
        "pp2-interleaved", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), schedule="interleaved"
    ),
    Case(
        "pp3-in-flight",
        shares=(6,),
        microbatch=1,
        dp=((1, 1, 1),),
        layers=((2, 1, 1),),
        in_flight=(5, 2, 2),
    ),
    Case(
        "pp2-lists-tied",
        shares=(6,),
        microbatch=1,
        dp=((1, 1),),
        layers=((3, 1),),
        lists=(("4F 2(B F) 4B", "2F 4(B F) 2B"),),
        tied=True,
    ),
    Case(
        "pp3-lists-halves",
        shares=(6,),
        microbatch=1,
        dp=((1, 1, 1),),
        layers=((2, 1, 1),),
        schedule="zb-h1",
        lists=(("5F I F 2I 2(W I) I 4W", "3F I F 2(I W F) 3I 4W", "2(F I) 4(F I W) 2W"),),
    ),
    Case(
        "pp2-lists-v",
        shares=(6,),
        microbatch=1,
        dp=((1, 1),),
        layers=((1, 1, 1, 1),),
        schedule="zb-v",
        lists=(
            (
                "6F 2(F1 I1 W1) 2(I W) 4(F1 I1 W1 I W)",
                "2(F F1) F 2(I1 I) F1 W1 F I1 I F1 2W1 I1 I F F1 W1 W F I1 I F1 W1 2W I1 I W1 3W",
            ),
        ),
    ),
    Case(
        "pp2-lists-interleaved-tied",
        shares=(6,),
        dp=((1, 2),),
        microbatch=1,
        layers=((1, 1, 0, 2),),
        schedule="interleaved",
        zero=1,
        tied=True,
        lists=(
            (
                "3F 3F1 2B1 F B F F1 B B1 F F1 B1 F1 2B 2B1 2B",
                "3F 2(F1 B1) B F1 B F B1 F1 F B1 F 2(F1 B) 2B1 2B",
            ),
        ),
    ),
    Case(
        "pp4-lists-beside-pp2",
        shares=(4, 2),
        microbatch=1,
        dp=((1, 1, 1, 1), (1, 1)),
        layers=((1, 1, 1, 1), (1, 3)),
        lists=(("4F 4B", "3F B F 3B", "3F B F 3B", "2(F B) 2F 2B"), ("2F 2B", "2(F B)")),
    ),
    Case("pp2-zb-h1", shares=(6,), dp=((1, 1),), layers=((3, 1),), schedule="zb-h1"),
    Case("pp2-zb-v", shares=(6,), dp=((1, 1),), layers=((1, 2, 0, 1),), schedule="zb-v"),
    Case(
        "pp2-zb-v-tied",
        shares=(6,),
        dp=((1, 1),),
        layers=((1, 1, 1, 1),),
        schedule="zb-v",
        tied=True,
    ),
    Case(
        "pp2-dualpipe-v", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), schedule="dualpipe-v"
    ),
    Case(
        "unlike-pipelines-dualpipe-v",
        shares=(4, 2),
        dp=((1, 1), (1, 1)),
        layers=((1, 1, 1, 1), (2, 1, 1, 0)),
        schedule="dualpipe-v",
    ),
    Case("pp2-tied", shares=(6,), dp=((1, 1),), layers=((2, 2),), tied=True),
    Case("pp2-recompute", shares=(6,), dp=((1, 1),), layers=((2, 2),), recompute="full"),
    Case("dp2-pp2", shares=(6,), dp=((2, 2),), layers=((2, 2),), microbatch=3),
    Case("border-1-2", shares=(6,), dp=((1, 2),), layers=((3, 1),), microbatch=3),
    Case("border-3-2", shares=(6,), dp=((3, 2),), layers=((1, 3),), microbatch=4),
    Case("unlike-stages", shares=(4, 2), dp=((1, 2), (1,)), layers=((1, 3), (4,)), tied=True),
    Case("tp2", shares=(6,), dp=((1,),), tp=((2,),)),
    Case("tp4-shared-key-heads", shares=(6,), dp=((1,),), tp=((4,),), num_kv_heads=2),
    Case("dp2-tp2", shares=(6,), dp=((2,),), tp=((2,),), microbatch=3),
    Case("tp2-dp1-to-dp3", shares=(6,), dp=((1, 3),), tp=((2, 1),), layers=((2, 2),), microbatch=4),
    Case("dp2-tp2-pp2", shares=(6,), dp=((2, 2),), tp=((2, 2),), layers=((2, 2),), microbatch=3),
    Case("border-tp1-tp4", shares=(6,), dp=((1, 1),), tp=((1, 4),), layers=((1, 3),)),
    Case(
        "border-tp4-tp2",
        shares=(6,),
        dp=((1, 1),),
        tp=((4, 2),),
        layers=((1, 3),),
        tied=True,
        width_shares=(1, 3),
    ),
    Case(
        "border-dp2-tp2-outer",
        shares=(6,),
        dp=((2, 1),),
        tp=((2, 4),),
        layers=((2, 2),),
        microbatch=3,
        tp_outer=True,
    ),
    Case(
        "unlike-pipelines-tp",
        shares=(4, 2),
        dp=((1, 2), (1,)),
        tp=((2, 1), (3,)),
        layers=((1, 3), (4,)),
        tied=True,
    ),
]


def on_a_line(schedule: ScheduleName, *counts: int) -> tuple[int, ...]:
    """Layers of the stages of two meshes under a schedule: two stages, or four on a V or rounds."""
    return counts if schedule in ONE_STAGE_A_MESH else tuple(n for c in counts for n in (1, c - 1))


ONE_STAGE_A_MESH = ("gpipe", "1f1b", "zb-h1")
LEVELS = get_args(ZeroLevel)

SCHEDULES_BY_LAYERS = [
    Case(
        f"{schedule}-unequal",
        shares=(5,),
        microbatch=1,
        dp=((1, 1),),
        layers=(on_a_line(schedule, 3, 1),),
        schedule=schedule,
        tied=True,
    )
    for schedule in SCHEDULES
]
IN_OTHERS = (("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zb-h1", 3))
"""Rows below have these, beside whatever else they have here."""
SCHEDULES_BY_ZERO = [
    Case(
        f"{schedule}-zero{level}",
        shares=(7,),
        microbatch=2,
        dp=((2, 2),),
        layers=(on_a_line(schedule, 3, 1),),
        schedule=schedule,
        zero=level,
        tied=level == 2,
    )
    for schedule in SCHEDULES
    for level in LEVELS
    if level and (schedule, level) not in IN_OTHERS
]
SEAMS = [
    Case(
        f"seam-{axis}{a}-{axis}{b}",
        shares=(6,),
        microbatch=4,
        dp=((a, b) if axis == "dp" else (1, 1),),
        tp=((a, b) if axis == "tp" else (1, 1),),
        layers=((1, 3),),
        tied=a > b,
    )
    for axis in ("tp", "dp")
    for a, b in ((1, 4), (4, 1), (2, 4), (4, 2))
]
"""One rank sends to several, several to one, several to others that are several."""
SHARDED = [
    *(Case(f"zero{level}", shares=(6,), dp=((2,),), zero=level) for level in LEVELS if level),
    Case(
        "dp2-tp2-zero1-recompute",
        shares=(6,),
        dp=((2,),),
        tp=((2,),),
        microbatch=3,
        zero=1,
        recompute="full",
        tied=True,
    ),
    *(
        Case(
            f"unlike-pipelines-zero{level}",
            shares=(6, 2),
            dp=((1, 2), (1,)),
            tp=((2, 1), (3,)),
            layers=((1, 3), (4,)),
            zero=level,
            tied=True,
        )
        for level in (1, 2)
    ),
    Case("zero3-tied-recompute", shares=(5,), dp=((2,),), zero=3, tied=True, recompute="full"),
    Case("pipelines-2-1-zero2-gpt2", shares=(4, 2), zero=2, family="gpt2", dropout=0.2),
    Case("dp3-zero3-idle-rank", shares=(5,), dp=((3,),), zero=3, microbatch=2),
    Case("dp4-zero2-idle-rank", shares=(7,), dp=((4,),), zero=2, microbatch=3),
    Case("gpt2-dp2-pp2-zero3", shares=(6,), dp=((2, 2),), layers=((2, 2),), zero=3, family="gpt2"),
    Case(
        "unlike-levels",
        shares=(6,),
        dp=((2, 3, 2),),
        layers=((1, 2, 1),),
        microbatch=3,
        zeros=(3, 0, 1),
        tied=True,
    ),
]
MORE = [
    Case("three-unlike-meshes", shares=(6,), dp=((1, 2, 3),), tp=((2, 2, 1),),
         layers=((1, 2, 1),), microbatch=4, width_shares=(3, 1)),
    Case("pipelines-3-1-unlike-stages", shares=(6, 2), dp=((1, 1), (1, 1, 1)),
         layers=((3, 1), (1, 1, 2)), tied=True),
    Case("pipelines-of-unlike-schedules", shares=(6, 2), dp=((1, 1), (1, 1)),
         layers=((1, 1, 1, 1), (1, 1, 1, 1)), schedule="zb-v", zero=1),
    Case("passes", shares=(6,), dp=((2,),), microbatch=5, passes=2),
    Case("passes-zb-h1-zero3", shares=(6,), dp=((2, 2),), layers=((2, 2),), microbatch=6,
         passes=3, schedule="zb-h1", zero=3),
    Case("tp2-zb-h1-gpt2-attention", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),),
         schedule="zb-h1", family="gpt2", dropout=0.2, recompute="activation+attention:1"),
    Case("tp2-zb-h1-gpt2-feed-forward", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),),
         schedule="zb-h1", family="gpt2", dropout=0.2, recompute="core+feed_forward"),
    Case("passes-gpt2-tp2", shares=(6,), dp=((1,),), tp=((2,),), microbatch=3, passes=2,
         family="gpt2", dropout=0.1, recompute="full"),
]  # fmt: skip

PIECES = [
    Case("pieces2-tp2", shares=(6,), dp=((1,),), tp=((2,),), pieces=2),
    Case("pieces3-tp3-uneven", shares=(6,), dp=((1,),), tp=((3,),), pieces=3, recompute="full"),
    Case("pieces3-gpt2-tp2-pp2", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),),
         pieces=3, family="gpt2", dropout=0.2, width_shares=(3, 1)),
    Case("pieces2-zb-h1-recompute", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),),
         pieces=2, schedule="zb-h1", recompute="full"),
    Case("pieces3-zb-v-tied", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((1, 1, 1, 1),),
         pieces=3, schedule="zb-v", tied=True),
    Case("pieces2-dp2-tp2-outer-zero3", shares=(6,), dp=((2,),), tp=((2,),), microbatch=3,
         pieces=2, zero=3, recompute="full", tp_outer=True, width_shares=(3, 1)),
    Case("pieces3-border-tp1-tp4", shares=(6,), dp=((1, 1),), tp=((1, 4),), layers=((1, 3),),
         pieces=3, num_kv_heads=2, passes=2, microbatch=3),
]  # fmt: skip

UNEVEN = [
    *(
        Case(f"zero{level}-keeps-{one}-{other}", shares=(6,), dp=((2,),), microbatch=4, zero=level,
             tied=level == 2, sample_shares=((3, 1),), state_shares=((one, other),))
        for level, one, other in ((1, 1, 7), (2, 1, 7), (2, 0, 8))
    ),
    *(
        Case(f"zero{level}-works-or-keeps", shares=(6,), dp=((3,),), microbatch=3, zero=level,
             sample_shares=((2, 1, 0),), state_shares=((0, 1, 3),), recompute="full")
        for level in LEVELS if level
    ),
    Case("samples-5-1", shares=(7,), dp=((2,),), microbatch=6, sample_shares=((5, 1),), passes=2),
    Case("gpt2-dp2-tp2-zero3-uneven", shares=(6,), dp=((2,),), tp=((2,),), microbatch=3, zero=3,
         family="gpt2", dropout=0.2, sample_shares=((2, 1),), state_shares=((1, 0, 4, 3),),
         width_shares=(1, 3)),
    Case("pipelines-zero2-one-keeps-all", shares=(4, 2), dp=((1,), (1,)), zero=2,
         state_shares=((0,), (1,))),
    *(
        Case(f"zero{level}-one-only-keeps", shares=(6, 0), dp=((2,), (1,)), microbatch=4,
             zero=level, tied=level == 2, state_shares=((0, 0), (1,)))
        for level in (1, 2)
    ),
    Case("pp2-zero1-one-only-keeps", shares=(5, 0), dp=((1, 1), (1,)), layers=((2, 2), (4,)),
         zero=1, state_shares=((2,), (3,))),
    Case("pipelines-tp2-zero1-each-keeps-a-part", shares=(4, 2), dp=((1,), (1,)), tp=((2,), (2,)),
         zero=1, state_shares=((1, 0), (0, 1))),
    Case("unlike-pipelines-zero1-uneven", shares=(6, 2), dp=((1, 2), (1,)), tp=((2, 1), (3,)),
         layers=((1, 3), (4,)), zero=1, tied=True, state_shares=((3, 1), (0, 2, 5)),
         width_shares=(1, 2, 1)),
    Case("pp2-zb-h1-zero3-uneven", shares=(7,), dp=((2, 2),), layers=((3, 1),), schedule="zb-h1",
         microbatch=3, zero=3, sample_shares=((1, 2),), state_shares=((7, 1),)),
    Case("pp2-zb-v-zero2-uneven-tied", shares=(7,), dp=((2, 2),), layers=((1, 1, 1, 1),),
         schedule="zb-v", zero=2, tied=True, sample_shares=((0, 1),), state_shares=((5, 2),)),
    *(
        Case(f"domains-zero{level}-uneven", shares=(4, 2), dp=((3,), (2,)), microbatch=3,
             zero=level, domains=((3, 4), (0, 1, 2)), sample_shares=((1, 2, 0), (1, 1)),
             state_shares=((0, 3, 1), (1, 2)))
        for level in LEVELS if level
    ),
]  # fmt: skip

DOMAINS = [
    Case("domains-zero0-2-1", shares=(4, 2), dp=((2,), (1,)), microbatch=3,
         domains=((0, 1), (2,))),
    Case("domains-zero1-3-2", shares=(4, 2), dp=((3,), (2,)), microbatch=2, zero=1, tied=True,
         domains=((3, 4), (0, 1, 2))),
    Case("domains-zero2-2-1", shares=(4, 2), dp=((2,), (1,)), microbatch=2, zero=2, family="gpt2",
         dropout=0.2, domains=((0, 1), (2,))),
    Case("domains-zero3-pipelines", shares=(5, 2), dp=((2, 2), (2,)), layers=((1, 3), (4,)),
         zero=3, tied=True, domains=((0, 1, 2, 3), (4, 5))),
    Case("domains-zero3-one-mesh-idle-rank", shares=(7,), dp=((4,),), microbatch=3, zero=3,
         recompute="full", domains=((0, 1), (2, 3))),
    Case("domains-three-unlike", shares=(3, 1, 2), dp=((2,), (1,), (2,)), microbatch=2, zero=2,
         domains=((3, 4), (0, 1), (2,))),
    Case("domains-unlike-pipelines-tp", shares=(4, 2), dp=((1, 2), (1,)), tp=((2, 1), (3,)),
         layers=((1, 3), (4,)), tied=True, domains=((0, 1, 2, 3), (4, 5, 6)),
         width_shares=(1, 2, 1)),
    Case("domains-across-stages-zb-v", shares=(6,), dp=((2, 2),), layers=((1, 1, 1, 1),),
         schedule="zb-v", zero=1, tied=True, domains=((0, 2), (1, 3))),
]  # fmt: skip

CUT = [
    Case("cut", shares=(6,), dp=((1, 1),), layers=((1.5, 2.5),),
         recompute="activation+attention:2"),
    Case("cut-tp2-tied-recompute", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2.5, 1.5),),
         tied=True, recompute="full", pieces=2),
    Case("cut-feed-forward-alone-gpt2", shares=(6,), dp=((1, 1, 1),), layers=((1.5, 0.5, 2),),
         schedule="zb-h1", family="gpt2", dropout=0.2, recompute="core"),
    Case("cut-zb-v-both-parts-on-one-rank", shares=(6,), dp=((1, 1),), layers=((1, 0.5, 1.5, 1),),
         schedule="zb-v", tied=True, microbatch=1),
    Case("cut-interleaved-zero3", shares=(6,), dp=((2, 2),), layers=((0.5, 1.5, 1, 1),),
         schedule="interleaved", zero=3, recompute="full"),
    Case("cut-beside-whole-zero1", shares=(6, 2), dp=((1, 2), (1,)), tp=((2, 1), (3,)),
         layers=((1.5, 2.5), (4,)), zero=1, tied=True),
    Case("cut-unlike-gpt2-zero2", shares=(4, 2), dp=((1, 1), (1, 1, 1)), microbatch=1, zero=2,
         layers=((2.5, 1.5), (2, 0.5, 1.5)), family="gpt2", dropout=0.2),
]  # fmt: skip

POSITIONS = [
    Case("cp2", shares=(6,), dp=((1,),), cp=((2,),)),
    Case("cp8-recompute", shares=(2,), dp=((1,),), cp=((8,),), recompute="attention"),
    Case("by-work-cp2-gpt2-dropout", shares=(4,), dp=((1,),), cp=((2,),), by_work=True,
         family="gpt2", dropout=0.2),
    Case("cp4-dp2-zero3-recompute", shares=(6,), dp=((2,),), cp=((4,),), microbatch=3, zero=3,
         recompute="full"),
    Case("cp2-tp2-tied-zero1", shares=(6,), dp=((1,),), cp=((2,),), tp=((2,),), tied=True, zero=1,
         passes=2, width_shares=(3, 1)),
    Case("cp2-tp2-outer-gpt2", shares=(6,), dp=((1,),), cp=((2,),), tp=((2,),), tp_outer=True,
         family="gpt2", dropout=0.2, recompute="core"),
    Case("border-cp1-cp4-tp2", shares=(6,), dp=((1, 1),), cp=((1, 4),), tp=((1, 2),),
         layers=((1.5, 2.5),), num_kv_heads=2, zero=1, by_work=True),
    Case("border-cp4-dp2-cp2-zb-h1", shares=(6,), dp=((1, 2),), cp=((4, 2),), layers=((2, 2),),
         schedule="zb-h1", microbatch=3, zero=2, by_work=True),
    Case("cp2-zb-v-tied", shares=(6,), dp=((1, 1),), cp=((2, 2),), tp=((1, 2),),
         layers=((1, 1, 1, 1),), schedule="zb-v", tied=True, recompute="attention"),
    Case("rows-cp8-zero1", shares=(2,), dp=((1,),), cp=((8,),), zero=1, scores="rows"),
    Case("rows-heads2-cp4-pp2-few-keys", shares=(6,), dp=((1, 1),), cp=((4, 2),), layers=((1, 3),),
         head_ways=2, scores="rows", num_kv_heads=2, recompute="core", by_work=True),
    Case("heads8-cp8-few-keys", shares=(2,), dp=((1,),), cp=((8,),), head_ways=8, num_kv_heads=2),
    Case("heads2-cp4-tp2-zero2", shares=(6,), dp=((1,),), cp=((4,),), tp=((2,),), head_ways=2,
         zero=2, recompute="core", by_work=True),
    Case("heads4-border-cp2-cp4-zero3", shares=(6,), dp=((1, 1),), cp=((2, 4),), head_ways=4,
         layers=((1.5, 2.5),), schedule="zb-h1", zero=3, microbatch=3, num_kv_heads=8),
    Case("rows-cp2", shares=(2,), dp=((1,),), cp=((2,),), scores="rows"),
    Case("rows-cp2-tp2-beside-cp2-zero2", shares=(4, 2), dp=((1,), (1,)), cp=((2,), (2,)),
         tp=((2,), (1,)), scores="rows", zero=2, recompute="full"),
    Case("rows-border-cp4-cp2-zero3", shares=(6,), dp=((1, 1),), cp=((4, 2),), layers=((3, 1),),
         scores="rows", zero=3),
    Case("heads4-cp8", shares=(2,), dp=((1,),), cp=((8,),), head_ways=4, num_kv_heads=2),
    Case("heads2-cp2-tp2-beside-border-cp4-cp2-zero1", shares=(4, 2), dp=((1, 1), (1,)),
         cp=((4, 2), (2,)), tp=((1, 1), (2,)), layers=((2.5, 1.5), (4,)), head_ways=2, zero=1),
    Case("heads2-border-cp4-zero3-cp2-zero2", shares=(6,), dp=((1, 1),), cp=((4, 2),), head_ways=2,
         layers=((1, 3),), zeros=(3, 2), schedule="gpipe"),
    Case("cp2-tp2-pp2-zero3", shares=(3,), dp=((1, 1),), cp=((2, 2),), tp=((2, 2),),
         layers=((1, 3),), zero=3, by_work=True),
    Case("heads4-cp4-tp2-zero1", shares=(2,), dp=((1,),), cp=((4,),), tp=((2,),), head_ways=4,
         zero=1),
    Case("heads4-cp4-pp2-zero2", shares=(3,), dp=((1, 1),), cp=((4, 4),), layers=((2, 2),),
         head_ways=4, zero=2, num_kv_heads=2, by_work=True),
    Case("rows-cp4-tp2", shares=(2,), dp=((1,),), cp=((4,),), tp=((2,),), scores="rows"),
    Case("rows-cp4-pp2-zero3", shares=(3,), dp=((1, 1),), cp=((4, 4),), layers=((3, 1),),
         scores="rows", zero=3),
    Case("unlike-pipelines-cp", shares=(4, 2), dp=((1, 2), (1,)), cp=((2, 1), (2,)),
         tp=((1, 1), (2,)), layers=((1, 3), (4,)), zero=2, tied=True, by_work=True),
]  # fmt: skip

HEADS = [
    Case("head-two-parts", shares=(6,), dp=((1, 1),), layers=((2, 2),), heads=((40, 57),),
         recompute="full"),
    Case("head-three-parts-in-flight", shares=(6,), dp=((1, 1, 1),), layers=((1, 3, 0),),
         heads=((40, 6, 51),), microbatch=1, in_flight=(6, 5, 1)),
    Case("head-three-parts-lists", shares=(6,), dp=((1, 1, 1),), layers=((1, 3, 0),),
         heads=((40, 6, 51),), microbatch=1, lists=((
             "6F 2(F1 B1) F1 B 2(B B1 F1) B1 B F1 B1 2B",
             "6F 2(F1 B1) F1 B B1 B 2(F1 B B1) F1 B1 2B",
             "2F F1 4F 2(B1 F1 B) 2(B1 B F1) B1 F1 B B1 B"),)),
    Case("head-gpipe", shares=(6,), dp=((1, 1),), layers=((2, 2),), heads=((40, 57),),
         microbatch=1, schedule="gpipe"),
    Case("head-interleaved", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), heads=((40, 57),),
         microbatch=1, schedule="interleaved"),
    Case("head-elsewhere-cut", shares=(6,), dp=((2, 1, 1),), layers=((1, 2.5, 0.5),),
         heads=((57, 40, 0),)),
    Case("head-tp3-zero1", shares=(6,), dp=((2, 1),), tp=((1, 3),), layers=((2, 2),),
         heads=((40, 57),), zeros=(1, 0, 0), width_shares=(2, 1, 1)),
    Case("head-dp4-idle-rank-zero3", shares=(6,), dp=((4, 2),), layers=((2, 2),), microbatch=3,
         heads=((40, 57),), zero=3),
    Case("head-unlike-beside-whole-zero2", shares=(4, 2), dp=((1, 2), (2,)), tp=((2, 1), (1,)),
         layers=((3, 1), (4,)), heads=((20, 77), ()), zero=2),
    Case("head-zb-v", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), schedule="zb-v",
         heads=((40, 57),), microbatch=1),
    Case("head-zb-h1", shares=(6,), dp=((1, 1),), layers=((3, 1),), schedule="zb-h1",
         heads=((77, 20),), microbatch=1),
]  # fmt: skip

_ADDING = ExpertsSpec(count=6, top_k=2, balance=0.05, z=0.01, shared_d_ff=8)
_SIGMOID = ExpertsSpec(count=6, top_k=3, scores="sigmoid", normed=False)
_BIASED = ExpertsSpec(
    count=6,
    top_k=2,
    scores="sigmoid",
    groups=3,
    top_groups=2,
    scale=1.7,
    bias_step=0.4,
    shared_d_ff=8,
    shared_gate=False,
)
"""A step moves biases by as much as scores differ: it shows in the next one's choices."""
EXPERTS = [
    Case("experts-unlike-zero3", shares=(4, 2), dp=((2,), (1,)), zero=3, experts=_ADDING),
    Case(
        "experts-pp2-recomputed",
        shares=(6,),
        dp=((1, 1),),
        layers=((1.5, 2.5),),
        recompute="full",
        experts=_ADDING,
    ),
    Case(
        "experts-zb-h1-tp2",
        shares=(6,),
        dp=((1, 1),),
        tp=((2, 1),),
        layers=((2, 2),),
        schedule="zb-h1",
        experts=_ADDING,
    ),
    Case(
        "experts-norms-tp4",
        shares=(6,),
        dp=((1, 1),),
        tp=((4, 1),),
        layers=((2, 2),),
        num_kv_heads=2,
        norms_all_heads=True,
        experts=_ADDING,
    ),
    Case(
        "experts-biased-zero3-pp2",
        shares=(6,),
        dp=((2, 1),),
        layers=((2, 2),),
        zero=3,
        experts=_BIASED,
    ),
    Case("experts-biased-tp2", shares=(6,), dp=((1,),), tp=((2,),), experts=_BIASED,
         width_shares=(1, 3)),
    Case("experts-biased-cp2", shares=(6,), dp=((1,),), cp=((2,),), experts=_BIASED),
    Case("experts-ep4-recomputed-passes", shares=(7,), dp=((1,),), ep=((4,),), microbatch=5,
         recompute="full", passes=2, experts=replace(_SIGMOID, count=7)),
    Case("experts-dp2-ep2-zero2-idle-rank", shares=(7,), dp=((2,),), ep=((2,),), microbatch=4,
         zero=2, experts=replace(_ADDING, groups=3, top_groups=2)),
    Case("experts-dp2-ep2-zero3", shares=(6,), dp=((2,),), ep=((2,),), microbatch=6, zero=3,
         recompute="full", expert_shares=(3, 1), experts=replace(_ADDING, count=7, top_k=3)),
    Case("experts-dp2-ep2-zero1-on-disk", shares=(6,), dp=((2,),), ep=((2,),), microbatch=4, zero=1,
         expert_tier="disk", expert_layers=3, experts=_ADDING),
    Case("experts-at-places-ep2-zero2", shares=(6,), dp=((1,),), ep=((2,),), microbatch=3, zero=2,
         expert_places=((0, 1, 1, 0, 1, 0), (1, *5 * (0,)), (0, 0, 0, 1, 1, 1), (*5 * (1,), 0)),
         experts=_ADDING),
    Case("experts-copied-ep2-dp2-zero3", shares=(6,), dp=((2,),), ep=((2,),), microbatch=4, zero=3,
         expert_places=(((0, 1), 0, 1, 0, 1, (0, 1)), *3 * ((0, 0, 0, 1, 1, 1),)),
         experts=_ADDING),
    Case("experts-copied-dp2-ep2-on-disk", shares=(6,), dp=((2,),), ep=((2,),), microbatch=4,
         expert_tier="disk", expert_places=(*2 * ((0, 1, 1, 0, 1, 0), ((0, 1), *5 * (0,)),),),
         experts=_ADDING),
    Case("experts-copied-two-by-two-ep4-zero1", shares=(6,), dp=((1,),), ep=((4,),), microbatch=5,
         expert_ways=2, expert_pieces=2, zero=1, experts=_ADDING,
         expert_places=(((0, 3), 1, 2, 3, (0, 1, 2), 0), *3 * ((0, (0, 2), 1, 2, 3, (1, 2, 3)),))),
    Case("experts-two-by-two-ep4", shares=(6,), dp=((1,),), ep=((4,),), microbatch=4,
         expert_ways=2, expert_pieces=3, recompute="feed_forward", experts=_ADDING),
    Case("experts-ep2-cp2-zero1", shares=(4,), dp=((1,),), ep=((2,),), cp=((2,),), zero=1,
         experts=_SIGMOID),
    Case("experts-ep2-tp2-pp2-zb-h1", shares=(5,), dp=((1, 1),), ep=((2, 2),), tp=((2, 1),),
         layers=((1.5, 2.5),), schedule="zb-h1", microbatch=2, tp_outer=True, experts=_ADDING,
         width_shares=(3, 1), recompute="activation"),
    Case("experts-unlike-ep", shares=(4, 2), dp=((1, 2), (1,)), ep=((2, 1), (3,)), microbatch=4,
         tp=((1, 2), (1,)), layers=((1, 3), (4,)), zero=2, tied=True, expert_shares=(1, 2, 1),
         experts=_ADDING),
    Case("experts-ep2-zb-v", shares=(6,), dp=((1, 1),), ep=((2, 2),), layers=((1, 1, 1, 1),),
         schedule="zb-v", tied=True, recompute="attention", expert_pieces=2, experts=_ADDING),
    Case("experts-cp2", shares=(4,), dp=((1,),), cp=((2,),), experts=replace(_SIGMOID, z=0.01)),
    Case("experts-balanced-cp2-tp2-pp2", shares=(5,), dp=((1, 1),), cp=((2, 1),), tp=((2, 1),),
         layers=((1.5, 2.5),), microbatch=2, recompute="full", by_work=True, experts=_ADDING),
]  # fmt: skip
"""Loads and large logits add to the loss of every stage."""

_LOW = LatentSpec(q_rank=5, kv_rank=6, d_rope=4, d_value=3)
_DEEPSEEK = replace(_BIASED, d_ff=8, dense_layers=1)
LATENT = [
    Case("latent-tp2-pp2-zero2", shares=(6,), dp=((1, 2),), tp=((2, 1),), layers=((1.5, 2.5),),
         zero=2, latent=_LOW, experts=_DEEPSEEK),
    Case("latent-ep2-cp2-zero3", shares=(4,), dp=((1,),), ep=((2,),), cp=((2,),), zero=3,
         latent=replace(_LOW, q_rank=0), experts=_DEEPSEEK),
    Case("latent-heads2-cp4", shares=(4,), dp=((1,),), cp=((4,),), head_ways=2, recompute="core",
         latent=_LOW),
    Case("latent-rows-cp2-tp3-pieces", shares=(4,), dp=((1,),), cp=((2,),), tp=((3,),), pieces=2,
         scores="rows", latent=_LOW, width_shares=(1, 2, 1)),
]  # fmt: skip
"""As in DeepSeek-V3: the first layer has no experts."""

_EXPERTS_CHOOSE = ExpertsSpec(
    count=6, top_k=2, choice="experts", z=0.01, normed=False, shared_d_ff=8
)
_FEW = ExpertsSpec(count=6, top_k=2, capacity=0.4, balance=0.05)
"""An expert has room for 4 of the 16 tokens of a sample, where an even share is 5.3."""
GATES = [
    Case("experts-choose-ep2-tp2-pp2", shares=(5,), dp=((1, 1),), ep=((2, 2),), tp=((2, 1),),
         layers=((1.5, 2.5),), recompute="full", experts=_EXPERTS_CHOOSE),
    Case("experts-choose-unlike-zero3", shares=(4, 2), dp=((2,), (1,)), zero=3,
         experts=replace(_EXPERTS_CHOOSE, scores="sigmoid", normed=True)),
    Case("experts-dropping-ep4-idle-rank", shares=(7,), dp=((1,),), ep=((4,),), microbatch=5,
         passes=2, experts=_FEW),
    Case("experts-dropping-dp2-tp2-zb-h1", shares=(6,), dp=((2, 1),), tp=((1, 2),),
         layers=((2, 2),), schedule="zb-h1", zero=2, experts=replace(_FEW, bias_step=0.1)),
]  # fmt: skip

EIGHT_BITS = [
    Case("fp8-unlike-pipelines-tp", shares=(4, 2), dp=((2,), (1,)), tp=((1,), (3,)),
         precision="fp8-fp64", tied=True),
    Case("fp8-tp2-zb-h1-recompute", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2.5, 1.5),),
         schedule="zb-h1", recompute="full", precision="fp8-fp64", width_shares=(3, 1)),
    Case("fp8-gpt2-tp2-zero3", shares=(6,), dp=((2,),), tp=((2,),), microbatch=3, zero=3,
         family="gpt2", dropout=0.2, precision="fp8-fp64", width_shares=(1, 3)),
    Case("fp8-rowwise-tp2-zb-v", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((1, 1, 1, 1),),
         schedule="zb-v", precision="fp8-rowwise-fp64"),
    Case("fp8-rowwise-dp4-idle-rank", shares=(6,), dp=((4,),), microbatch=3, zero=2,
         precision="fp8-rowwise-fp64"),
    Case("fp8-blockwise-dp2-pp2", shares=(6,), dp=((2, 1),), layers=((2, 2),), zero=1,
         precision="fp8-blockwise-fp64"),
    Case("fp8-delayed-tp2-pp2-zb-h1", shares=(6,), dp=((2, 1),), tp=((1, 2),), layers=((2.5, 1.5),),
         schedule="zb-h1", zero=1, microbatch=3, tied=True, precision="fp8-delayed-fp64"),
    Case("fp8-delayed-unlike-pipelines-zero3-recompute", shares=(4, 2), dp=((2,), (1,)),
         cp=((1,), (2,)), zero=3, recompute="full", family="gpt2", dropout=0.2,
         precision="fp8-delayed-fp64"),
    Case("fp8-cp4-tp2-zb-h1", shares=(2,), microbatch=1, dp=((1, 1),), cp=((4, 2),), tp=((1, 2),),
         layers=((2.5, 1.5),), schedule="zb-h1", zero=1, precision="fp8-fp64"),
    Case("fp8-rowwise-cp2-tp2-recompute", shares=(4,), dp=((1,),), cp=((2,),), tp=((2,),),
         family="gpt2", dropout=0.2, recompute="full", precision="fp8-rowwise-fp64"),
    Case("fp8-blockwise-cp2-dp2-zero3", shares=(2,), dp=((2,),), cp=((2,),), zero=3, seq_len=512,
         precision="fp8-blockwise-fp64"),
    Case("fp8-tp4-shared-key-heads-zero2", shares=(6,), dp=((2,),), tp=((4,),), num_kv_heads=2,
         zero=2, precision="fp8-fp64"),
    Case("fp8-gathered-gpt2-tp2-zb-h1-zero3", shares=(6,), dp=((2, 1),), tp=((2, 2),),
         layers=((2.5, 1.5),), schedule="zb-h1", microbatch=3, zero=3, recompute="full",
         gather="fp8", family="gpt2", dropout=0.2, precision="fp8-fp64"),
    Case("fp8-gathered-unlike-pipelines-zero1", shares=(4, 2), dp=((2,), (1,)), tp=((1,), (3,)),
         zero=1, tied=True, gather="fp8", precision="fp8-fp64"),
    Case("fp8-gathered-blockwise-dp4-domains-zero2", shares=(6,), dp=((4,),), microbatch=3, zero=2,
         domains=((0, 1), (2, 3)), gather="fp8", precision="fp8-blockwise-fp64"),
    Case("fp8-experts-ep2-tp2-zero2", shares=(6,), dp=((1,),), ep=((2,),), tp=((2,),), zero=2,
         microbatch=3, experts=replace(_ADDING, shared_d_ff=64), precision="fp8-fp64"),
    Case("fp8-rowwise-experts-ep2-zb-h1-zero2", shares=(6,), dp=((1, 2),), ep=((2, 1),),
         layers=((1.5, 2.5),), schedule="zb-h1", zero=2, recompute="full", microbatch=2,
         experts=_SIGMOID, precision="fp8-rowwise-fp64"),
    Case("fp8-delayed-latent-tp2-zb-h1", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),),
         schedule="zb-h1", latent=_LOW, precision="fp8-delayed-fp64"),
]  # fmt: skip

PARITY = [
    *EXPERTS,
    *GATES,
    *LATENT,
    *ONE_BY_ONE,
    *SCHEDULES_BY_LAYERS,
    *SCHEDULES_BY_ZERO,
    *SEAMS,
    *SHARDED,
    *MORE,
    *PIECES,
    *DOMAINS,
    *UNEVEN,
    *CUT,
    *POSITIONS,
    *HEADS,
]

EVERY = [*PARITY, *EIGHT_BITS]
"""Whatever compares plans with one process takes its rows from here."""
