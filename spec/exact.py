"""Exponential, logarithm and sums that come out the same, bit for bit, on every machine.

The exp and log of libraries differ in the last bits from device to device, and a sum of floats depends
on its order. Here both functions are float64 additions, multiplications and divisions, each rounded
once (so no fused multiply-add), and what is summed is whole numbers.

As in ``index.py`` a function imports nothing and calls none of the others, so that the very same one
runs on torch tensors, on Python floats and inside Triton kernels. What they do not share is how to
read a float64's bits as an int64 and back: callers hand that in, as ``bits_of`` and ``float_of``.
"""


def exponential(x, bits_of, float_of):
    """exp(x) of a float64 from -700 to 0: to 2**-28.5 of itself, at most 1, and 1 at 0.

    exp(x) = 2**n * 2**f with n whole and f from -1/2 to 1/2. The polynomial, 1 at f = 0, has the
    smallest largest relative error (found by exchange); n is added to its exponent bits.
    """
    exponent = x * 1.4426950408889634  # 1 / ln 2
    shifted = exponent + 6755399441055744.0  # 1.5 * 2**52: rounded to n, which fills the low bits
    f = exponent - (shifted - 6755399441055744.0)
    power = f * 0.0001559467701510541 + 0.0013406643847480061
    power = power * f + 0.009617692976143188
    power = power * f + 0.05550310551206981
    power = power * f + 0.24022652782876178
    power = power * f + 0.693147214967885
    power = power * f + 1.0
    return float_of(bits_of(power) + (bits_of(shifted) << 52))


def weight_steps(weight, bits_of):
    """A float64 from 0 to 1 in whole steps of 2**-50, rounded: 2**12 of them sum to 2**62 at most.

    4 + weight, whose last bit is worth one step, has the steps in its low bits.
    """
    return bits_of(weight + 4.0) - 4616189618054758400  # the bits of 4.0


def split_steps(steps, bits_of):
    """A float64 from 0 to 2**52 as two int64: rounded, and 2**51 times what that left out."""
    shifted = steps + 4503599627370496.0  # 2**52
    left = steps - (shifted - 4503599627370496.0)  # from -1/2 to 1/2
    return (
        bits_of(shifted) - 4841369599423283200,  # the bits of 2**52
        bits_of(left + 3.0) - 4613937818241073152,  # the bits of 3.0, whose last is worth 2**-51
    )


def log_1p(x, bits_of, float_of):
    """log(1 + x) of a float64 from 0 to 2**52, to some 2**-50 of itself.

    1 + x = 2**n * m with m from sqrt(1/2) to sqrt(2), and log(m) = 2 artanh((m - 1) / (m + 1)). What
    the sum 1 + x loses is put back to first order.
    """
    total = x + 1.0
    lost = x - (total - 1.0)
    bits = bits_of(total)
    n = (bits - 4604544271217802189) >> 52  # the bits of sqrt(1/2)
    m = float_of(bits - (n << 52))
    n_float = float_of(n + 4841369599423283200) - 4503599627370496.0  # n + 2**52, less 2**52
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = square * 0.047619047619047616 + 0.05263157894736842  # 1/21, 1/19
    series = series * square + 0.058823529411764705  # 1/17
    series = series * square + 0.06666666666666667  # 1/15
    series = series * square + 0.07692307692307693  # 1/13
    series = series * square + 0.09090909090909091  # 1/11
    series = series * square + 0.1111111111111111  # 1/9
    series = series * square + 0.14285714285714285  # 1/7
    series = series * square + 0.2  # 1/5
    series = series * square + 0.3333333333333333  # 1/3
    series = series * square + 1.0
    return n_float * 0.6931471805599453 + (s * series * 2.0 + lost / total)
