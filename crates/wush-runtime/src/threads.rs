//! Work on independent items: one after another, or with the feature `parallel` on rayon's threads. Each item's result is the
//! same either way.

/// `work` on every item and its index; the first error in order.
#[cfg(feature = "parallel")]
pub(crate) fn for_each_mut<T: Send, E: Send>(
    items: &mut [T],
    work: impl Fn(usize, &mut T) -> Result<(), E> + Sync + Send,
) -> Result<(), E> {
    use rayon::prelude::*;
    let done: Vec<_> = items.par_iter_mut().enumerate().map(|(index, item)| work(index, item)).collect();
    done.into_iter().collect()
}

/// `work` on every item and its index; the first error in order.
#[cfg(not(feature = "parallel"))]
pub(crate) fn for_each_mut<T, E>(items: &mut [T], work: impl Fn(usize, &mut T) -> Result<(), E>) -> Result<(), E> {
    items.iter_mut().enumerate().try_for_each(|(index, item)| work(index, item))
}

/// `work` on `0 .. n`, in order.
#[cfg(feature = "parallel")]
pub(crate) fn map<T: Send>(n: usize, work: impl Fn(usize) -> T + Sync + Send) -> Vec<T> {
    use rayon::prelude::*;
    (0..n).into_par_iter().map(work).collect()
}

/// `work` on `0 .. n`, in order.
#[cfg(not(feature = "parallel"))]
pub(crate) fn map<T>(n: usize, work: impl Fn(usize) -> T) -> Vec<T> {
    (0..n).map(work).collect()
}
