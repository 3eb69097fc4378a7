# SPDX-License-Identifier: Apache-2.0
"""What each table of bench/papers.py trains: its settings, its rows, and what the paper reports for a row.

A paper's figure is its own difference in test accuracy from its own uncompressed training, in points. Models, epochs
and schedules differ from ours, so only the signs and the orders of magnitude can be compared.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    codec: str
    paper: str = ""
    options: tuple = ()
    rival: str = ""  # the label of a row of the same size; the table ends with the differences from it

    @property
    def label(self):
        return " ".join([self.codec, *self.options])


@dataclass(frozen=True)
class Table:
    about: str
    settings: str  # options of gradwire compare; those given on the command line come after them and win
    rows: list = field(default_factory=list)
    reference: str = "fp32"  # the label of the row that differences are taken from
    steps_to: bool = False  # also the steps and bytes to a test loss
    server: bool = False  # over gradwire serve, with a process for each worker, on the CPU


# 2 bytes for a place and 4 for a value make topk cost 48 bits for each value that it keeps, so this share of values
# has the size of a codec with so many bits.
def topk(bits):
    return Row(f"topk:ratio={bits / 48:.3f}")


EXACT = [Row("fp32"), Row("bf16")]
QSGD = [Row(f"qsgd:bits={bits}") for bits in (4, 3, 2)]
# What a codec loses with error feedback and without it, and with parameters of one dimension left in fp32.
FEEDBACK = [
    Row("onebit"),
    Row("optquant:bits=2,mode=biased", "", ("--feedback", "off")),
    Row("optquant:bits=2,mode=biased", rival="optquant:bits=2,mode=biased --feedback off"),
    Row("fft:theta=0.85", "", ("--feedback", "off")),
    Row("fft:theta=0.85", rival="fft:theta=0.85 --feedback off"),
    topk(2.07),
]
VECTORS = ("--rules", "1d=fp32")
CIFAR10 = "--task cifar10 --model resnet20 --workers 8 --batch 128 --epochs 12 --rate 0.4 --warmup 2 --collective gather"
CASQ = "--task fashion-mnist --model mlp:width=128 --workers 16 --batch 16 --limit 16000 --epochs 10 --rate 0.1"
CASQ_PAPER = "the paper: ResNet-34, 16 workers and a server, 2 bits as accurate as others' 3"

TABLES = {
    "dqsgd": Table(
        "DQ-SGD, table 1: CIFAR-10 (the paper: ResNet-18, 8 workers)",
        CIFAR10,
        [
            *EXACT,
            Row("qsgd:bits=6", "-0.12"),
            Row("qsgd:bits=5"),
            Row("dqsgd:budget=4.5", "-0.22 at 4.50 bits"),
            Row("qsgd:bits=4", "-2.70"),
            Row("dqsgd:budget=3", rival="qsgd:bits=3"),
            Row("qsgd:bits=3"),
            Row("qsgd:bits=2", "-13.97 (TernGrad)"),
            topk(3),
        ],
    ),
    "dqsgd-text": Table(
        "DQ-SGD, table 1: AG-News (the paper: 8 workers)",
        "--task ag-news --model bilstm --workers 8 --batch 32 --epochs 5 --collective gather",
        [
            *EXACT,
            Row("qsgd:bits=6", "-0.10"),
            Row("qsgd:bits=5"),
            Row("dqsgd:budget=4.5", "-0.19 at 4.70 bits"),
            Row("qsgd:bits=4", "-1.22"),
            Row("dqsgd:budget=3", rival="qsgd:bits=3"),
            Row("qsgd:bits=3"),
            Row("qsgd:bits=2", "-5.36 (TernGrad)"),
            topk(3),
        ],
    ),
    "fft": Table(
        "FFT-based sparsification: CIFAR-10 (the paper: ResNet-32, 8 workers)",
        CIFAR10,
        [
            *EXACT,
            *QSGD[:1],
            Row("qsgd:bits=3", "-3.45"),
            *QSGD[2:],
            Row("fft:theta=0.85", rival="qsgd:bits=2"),
            Row("fft:theta=0.85", "-0.12", ("--feedback", "off")),
            Row("fft:theta=0.9,schedule=step,until={72%}"),
            Row("fft:theta=0.9,schedule=step,until={72%}", "as fp32", ("--feedback", "off")),
            Row("fft:theta=0.9,schedule=rate,smooth=10"),
            topk(2.07),
        ],
    ),
    "feedback": Table(
        "Error feedback, and parameters with one dimension: CIFAR-10",
        CIFAR10,
        [
            *EXACT[:1],
            *QSGD[2:],
            *FEEDBACK,
            Row("onebit", "", VECTORS, rival="onebit"),
            Row("optquant:bits=2,mode=biased", "", VECTORS, rival="optquant:bits=2,mode=biased"),
            Row("fft:theta=0.85", "", VECTORS, rival="fft:theta=0.85"),
            Row("topk:ratio=0.043", "", VECTORS, rival="topk:ratio=0.043"),
        ],
    ),
    "feedback-slow": Table(
        "Error feedback at a quarter of that learning rate: CIFAR-10",
        f"{CIFAR10} --rate 0.1",
        [
            *EXACT,
            *QSGD[2:],
            Row("optquant:bits=2"),
            *FEEDBACK,
            Row("onebit", "", VECTORS, rival="onebit"),
            Row("topk:ratio=0.043", "", VECTORS, rival="topk:ratio=0.043"),
        ],
    ),
    "sgd": Table(
        "SGD with momentum, both ways compressed: Fashion-MNIST",
        "--task fashion-mnist --model cnn --workers 4 --batch 32 --limit 16000 --epochs 3 --optimizer sgd "
        "--rules 1d=fp32 --collective scatter",
        [
            *EXACT,
            Row("qsgd:bits=4"),
            Row("optquant:bits=3"),
            Row("optquant:bits=2"),
            Row("casq:bits=2"),
            Row("fft:theta=0.85"),
            Row("onebit"),
            Row("onebit", options=("--down", "optquant:bits=4")),
            Row("topk:ratio=0.03"),
            Row("topk:ratio=0.03", options=("--down", "optquant:bits=4")),
        ],
    ),
    "casq": Table(
        f"CASQ: 16 workers that exchange gradients ({CASQ_PAPER})",
        f"{CASQ} --collective gather --evaluate-every 15",
        [
            *EXACT,
            *QSGD,
            Row("onebit"),
            Row("casq:bits=1", rival="qsgd:bits=2"),
            Row("casq:bits=2", rival="qsgd:bits=3"),
            Row("casq:bits=2,mode=paper"),
            Row("optquant:bits=3,mode=biased", rival="qsgd:bits=3"),
            Row("optquant:bits=2,mode=biased"),
            topk(3),
        ],
        steps_to=True,
    ),
    "casq-server": Table(
        f"CASQ: 16 workers and a parameter server, weights back in fp32 ({CASQ_PAPER})",
        f"{CASQ} --optimizer sgd --evaluate-every 15",
        [
            *EXACT,
            Row("qsgd:bits=3"),
            Row("qsgd:bits=2"),
            Row("casq:bits=2", rival="qsgd:bits=3"),
            Row("optquant:bits=3", rival="qsgd:bits=3"),
        ],
        steps_to=True,
        server=True,
    ),
    "optquant": Table(
        "OptQuant: CIFAR-10, 2 bits; levels that are never fitted, unbiased, biased, biased with feedback",
        CIFAR10,
        [
            *EXACT,
            *QSGD,
            Row("optquant:bits=3", rival="qsgd:bits=3"),
            Row("optquant:bits=2,refit=0"),
            Row("optquant:bits=2", rival="qsgd:bits=2"),
            Row("optquant:bits=2,mode=biased", "", ("--feedback", "off"), rival="qsgd:bits=2"),
            Row("optquant:bits=2,mode=biased", rival="qsgd:bits=2"),
            topk(2.07),
        ],
    ),
    "qadam": Table(
        "Quantized Adam: bits of the updates x bits of the weights x learning rates",
        "--task fashion-mnist --model mlp:width=128 --collective gather --workers 4 --limit 16000 --epochs 5",
        [
            *[Row("fp32", "", ("--optimizer", "adam", "--rate", rate)) for rate in ("0.002", "0.004", "0.008", "0.016")],
            *[
                Row(up, "", ("--optimizer", "qadam", "--down", down, "--rate", rate))
                for up in ("fp32", "loggrid:k=6", "loggrid:k=2", "loggrid:k=0")
                for down in ("fp32", "unigrid:bits=8", "unigrid:bits=6")
                for rate in ("0.004", "0.008", "0.016")
            ],
        ],
        reference="fp32 --optimizer adam --rate 0.008",
    ),
}
