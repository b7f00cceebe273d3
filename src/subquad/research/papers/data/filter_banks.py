"""Log-mel filter banks: a waveform as one vector of energies each 10 milliseconds."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray

BANDS = 40
WINDOW, HOP = 0.025, 0.010  # seconds
FLOOR = 1e-5  # of an energy: that of a quiet room in a recording of full scale ±1; digital silence is as loud


def filter_banks(samples: Float[ndarray, " samples"], rate: int, bands: int = BANDS) -> Float[ndarray, "frames bands"]:
    """F[t, m] = ln max(Σ_f M[m, f] · |DFT(w · x[h·t : h·t + n])[f]|², 10⁻⁵), in fp32.

    w: a Hann window of n samples (25 ms); h: a hop of 10 ms; M: triangles with corners evenly spaced on the mel scale,
    mel(f) = 2595 · log₁₀(1 + f/700), from 0 to half the rate (Davis and Mermelstein 1980; O'Shaughnessy 1987). Samples
    range from −1 to 1; a recording shorter than a window is one frame.
    """
    window, hop = round(WINDOW * rate), round(HOP * rate)
    points = 2 ** int(np.ceil(np.log2(2 * window)))  # padded with zeros, so that the narrowest triangle holds some
    samples = np.pad(samples, (0, max(0, window - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(samples, window)[::hop]
    power = np.abs(np.fft.rfft(frames * np.hanning(window), points)) ** 2
    return np.log(np.maximum(power @ triangles(bands, points, rate).T, FLOOR)).astype(np.float32)


def silence(frames: int, bands: int = BANDS) -> Float[ndarray, "frames bands"]:
    """The filter banks of digital silence."""
    return np.full((frames, bands), np.log(FLOOR), dtype=np.float32)


def normalised(features: Float[ndarray, "frames bands"]) -> Float[ndarray, "frames bands"]:
    """(F[t, m] − mean_t F[t, m]) / max(std_t F[t, m], 10⁻³): mean 0 and variance 1 in each band of one utterance."""
    deviation = np.maximum(features.std(axis=0), 1e-3)
    return ((features - features.mean(axis=0)) / deviation).astype(np.float32)


def triangles(bands: int, points: int, rate: int) -> Float[ndarray, "bands frequencies"]:
    """Each row rises from 0 at its lower neighbour's middle to 1 at its own and falls to 0 at its upper one's."""
    corners = _hertz(np.linspace(0.0, _mel(rate / 2), bands + 2))
    frequencies = np.fft.rfftfreq(points, 1 / rate)
    lower, middle, upper = (corners[i : i + bands, None] for i in range(3))
    rising, falling = (frequencies - lower) / (middle - lower), (upper - frequencies) / (upper - middle)
    return np.clip(np.minimum(rising, falling), 0.0, None)


def _mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))


def _hertz(mel: Float[ndarray, " corners"]) -> Float[ndarray, " corners"]:
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
