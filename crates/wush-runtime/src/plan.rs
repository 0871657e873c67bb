//! A layer's configuration with what follows from it: codecs, window sizes, feedback matrices. Made once a cache.

use wush_format::hash::Sha;
use wush_quant::{Codec, Feedback};

use crate::config::{CacheConfig, FullDtype, LayerConfig, Precision};
use crate::rows::Store;
use crate::{Result, RuntimeError, Windows};

/// Something for keys and the same for values.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Pair<T> {
    pub(crate) keys: T,
    pub(crate) values: T,
}

impl<T> Pair<T> {
    pub(crate) fn new(keys: T, values: T) -> Self {
        Self { keys, values }
    }

    pub(crate) fn each(&self) -> [&T; 2] {
        [&self.keys, &self.values]
    }

    pub(crate) fn each_mut(&mut self) -> [&mut T; 2] {
        [&mut self.keys, &mut self.values]
    }
}

/// What all sequences share of one layer.
#[derive(Debug, Clone)]
pub(crate) struct LayerPlan {
    pub(crate) layer: usize,
    pub(crate) config: LayerConfig,
    pub(crate) stores: Pair<Store>,
    /// Of the encoder, one a KV head.
    pub(crate) feedback: Pair<Option<Vec<Feedback>>>,
    /// Of the matrices that those were made from.
    pub(crate) feedback_hashes: Pair<Option<Sha>>,
    pub(crate) full: FullDtype,
    pub(crate) windows: Windows,
    pub(crate) page_tokens: usize,
    pub(crate) rewind: usize,
}

impl LayerPlan {
    pub(crate) fn new(cache: &CacheConfig, layer: usize) -> Result<Self> {
        let config = cache.layers[layer].clone();
        let store = |precision: &Precision| match precision {
            Precision::Full => Ok(Store::Full(cache.full)),
            Precision::Packed(quantizer) => Codec::new(config.head_dim, *quantizer)
                .map(Store::Packed)
                .map_err(|source| RuntimeError::Quant { layer, source }),
        };
        Ok(Self {
            layer,
            stores: Pair::new(store(&config.keys)?, store(&config.values)?),
            feedback: Pair::default(),
            feedback_hashes: Pair::default(),
            full: cache.full,
            windows: cache.windows,
            page_tokens: cache.page_tokens,
            rewind: cache.rewind,
            config,
        })
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.config.head_dim
    }

    /// Elements that the recent window of one head holds at most between chunks of one token.
    pub(crate) fn usual_recent(&self) -> usize {
        (self.windows.keep + self.windows.flush) * self.head_dim()
    }

    /// First position that a query at `position` reads.
    pub(crate) fn first_visible(&self, position: usize) -> usize {
        self.config.sliding_window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}
