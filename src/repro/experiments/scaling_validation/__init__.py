"""Does the step model hold on steps that others published? ZeRO++ against ZeRO-3 on 384 V100s; the overlap is fitted."""

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, bands, metrics


class ScalingValidation(Point):
    """Eight ratios of 18B and 138B parameters are fitted, eight of 49B and 91B are predicted."""

    draws: int = Field(
        2000, ge=2, description="of what else is uncertain: of the interval of the fit, and of the bands"
    )

    @property
    def label(self) -> str:
        return f"zeropp-v100-{self.draws}draws"


class ScalingValidationMetrics(
    bands(Number, "overlap"),
    metrics(Number, *(f"rms_log_error{of}" for of in ("", "_left_out", "_held_out", "_assumed"))),
):
    """`overlap`: best fit, between the ends of its 95 % interval. Errors are of ratios, log(predicted / published), and
    their root mean square:

    rms_log_error            of the eight fitted ratios
    rms_log_error_left_out   each of them predicted by a fit to the other seven
    rms_log_error_held_out   of the eight ratios that were not fitted; nearly repetitions of those of 138B
    rms_log_error_assumed    of the eight, with the overlap of 0.7 that was assumed before
    worst_log_error          of the eight, its size
    within_band              share of all 16 ratios inside their 95 % bands, of the machine's parameters and of
                             the model's own error, DeepSpeed's engine known
    within_band_machine      the same without the model's error
    tflops_log_bias          mean over all 32 TFLOPS, if the paper counts recomputation as work (4 passes, not 3)
    tflops_log_spread        their standard deviation around it
    """

    worst_log_error: Number
    within_band: Number
    within_band_machine: Number
    tflops_log_bias: Number
    tflops_log_spread: Number


EXPERIMENT = Experiment(ScalingValidation, ScalingValidationMetrics, timed=False)
