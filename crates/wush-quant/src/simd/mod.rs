//! The machine's vector instructions: which there are, and the loops compiled for each.
//!
//! Most loops are plain Rust ([`Work`], `plain`), compiled three times and vectorized by the compiler. The two products of
//! attention are written for AVX2 and AVX-512 besides (`x86`), and at 2 bits for two codes at a time (`tables`). All `unsafe`
//! of this crate is in this module: calls of functions compiled for more than the baseline, behind the check that the
//! machine has it, and unaligned loads and stores.

#[cfg(target_arch = "x86_64")]
#[expect(clippy::needless_range_loop, reason = "lanes and tokens are counted: every such loop is unrolled")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[expect(clippy::needless_range_loop, reason = "lanes are counted: every such loop becomes vectors")]
mod plain;
#[cfg(target_arch = "x86_64")]
#[expect(clippy::needless_range_loop, reason = "lanes and tokens are counted: every such loop is unrolled")]
mod tables;
mod tokens;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use plain::{Axpy, Dot};

/// Vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Level {
    /// What every machine of this architecture has.
    Portable,
    /// AVX2 with fused multiply-add.
    Avx2,
    /// AVX-512 F, BW and VL.
    Avx512,
}

impl Level {
    /// From narrow to wide.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The widest that this machine has.
    pub fn widest() -> Self {
        Self::ALL.into_iter().rev().find(|level| level.is_available()).unwrap_or(Self::Portable)
    }

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// For messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        }
    }
}

/// A loop that the compiler vectorizes.
pub(crate) trait Work {
    type Output;

    /// Runs it; must be `#[inline(always)]`, so that it is compiled into its caller's instructions. `FMA` tells whether
    /// `mul_add` is one instruction there.
    fn run<const FMA: bool>(self) -> Self::Output;
}

/// Whether the baseline itself fuses multiply and add.
const BASELINE_FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

/// Runs a loop compiled for `level`, which this machine has: a [`Level`] other than `Portable` reaches a codec only through
/// [`Level::widest`] or [`Codec::at`](crate::Codec::at), and both ask.
#[inline]
pub(crate) fn run<W: Work>(level: Level, work: W) -> W::Output {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has AVX2 and FMA, see above.
        Level::Avx2 => unsafe { run_avx2(work) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has AVX-512 F, BW and VL, see above.
        Level::Avx512 => unsafe { run_avx512(work) },
        _ => work.run::<BASELINE_FMA>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<W: Work>(work: W) -> W::Output {
    work.run::<true>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl")]
fn run_avx512<W: Work>(work: W) -> W::Output {
    work.run::<true>()
}

/// See [`Codec::dot`](crate::Codec::dot); lengths are right, and there is something to do.
pub(crate) fn dot(level: Level, dot: Dot<'_>) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has AVX2 and FMA, see `run`.
        Level::Avx2 => unsafe { avx2::dot(dot) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has AVX-512 F, BW and VL, besides AVX2 and FMA, see `run`.
        Level::Avx512 if dot.layout.bits() == crate::Bits::Two => unsafe { tables::dot(dot) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { avx512::dot(dot) },
        _ => run(level, dot),
    }
}

/// See [`Codec::axpy`](crate::Codec::axpy); lengths are right, and there is something to do.
pub(crate) fn axpy(level: Level, axpy: Axpy<'_>) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has AVX2 and FMA, see `run`.
        Level::Avx2 => unsafe { avx2::axpy(axpy) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has AVX-512 F, BW and VL, besides AVX2 and FMA, see `run`.
        Level::Avx512 if axpy.layout.bits() == crate::Bits::Two => unsafe { tables::axpy(axpy) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { avx512::axpy(axpy) },
        _ => run(level, axpy),
    }
}
