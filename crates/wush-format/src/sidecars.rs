//! A bundle's sidecars, held against its manifest and its model: whoever encodes with a bundle reads it here. Enters: a bundle's
//! directory; then the model's hash and heads. Leaves: sidecars that are all there, all of this bundle, and complete. Whether
//! their numbers can be (`query = key^{-T}`, feedback that is unit lower triangular) is the runtime's check.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use crate::bundle::{KEY_TRANSFORMS, KeyLayer, KeySidecar, MANIFEST, VALUE_FEEDBACK, ValueFeedback, WUSH_DIR};
use crate::hash::Sha;
use crate::manifest::{LayerReport, Manifest};
use crate::tensor_file::TensorFile;
use crate::{FormatError, Result};

/// [`Solve::center_keys`](crate::manifest::Solve) of a bundle without mean keys.
pub(crate) const NEVER: &str = "never";

/// What a server that quantizes takes from a bundle.
#[derive(Debug, Clone, PartialEq)]
pub struct Sidecars {
    /// The manifest.
    pub manifest: Manifest,
    /// Key transforms, with mean keys and feedback where the manifest says so.
    pub keys: KeySidecar,
    /// The values' feedback, where the manifest says so.
    pub values: Option<ValueFeedback>,
    folder: PathBuf,
}

impl Sidecars {
    /// Reads them. The weights are not read: [`Sidecars::check_model`] and `wush inspect` see to those.
    ///
    /// # Errors
    /// Whatever is wrong with a file alone; `Unfit` for one that is missing, not the listed one, of other weights than the
    /// manifest's, or without what the manifest says: a layer, mean keys, feedback; and for one with more than that.
    pub fn load(bundle: &Path) -> Result<Self> {
        let folder = bundle.join(WUSH_DIR);
        let manifest = Manifest::load(&folder.join(MANIFEST))?;
        let keys = KeySidecar::from_file(&open_listed(&folder, KEY_TRANSFORMS, &manifest)?)?;
        let values = match manifest.solve.feedback {
            true => Some(ValueFeedback::from_file(&open_listed(&folder, VALUE_FEEDBACK, &manifest)?)?),
            false => None,
        };
        let path = folder.join(VALUE_FEEDBACK);
        if values.is_none() && path.symlink_metadata().is_ok() {
            return Err(unfit(path, "solve.feedback of the manifest", true, false));
        }
        let sidecars = Self { manifest, keys, values, folder };
        sidecars.check_hashes()?;
        sidecars.check_extras()?;
        sidecars.check_layers()?;
        sidecars.check_report()?;
        Ok(sidecars)
    }

    /// The key sidecar's path, for messages.
    pub fn key_path(&self) -> PathBuf {
        self.folder.join(KEY_TRANSFORMS)
    }

    /// Checks that they belong to weights of this hash, and have exactly the layers of a model: `heads` has `(KV heads, head
    /// dimension)` of each.
    ///
    /// # Errors
    /// `Unfit`.
    pub fn check_model(&self, model_hash: Sha, heads: &[(usize, usize)]) -> Result<()> {
        let stated = self.manifest.basis.model_hash;
        if stated != model_hash {
            return Err(unfit(self.folder.join(MANIFEST), "hash of the weights", model_hash, stated));
        }
        for layer in 0..heads.len().max(self.keys.layers.len()) {
            let found = self.keys.layers.get(&layer).map(shape);
            let expected = heads.get(layer).copied();
            if found != expected {
                let what = format!("key transforms of layer {layer}");
                return Err(unfit(self.key_path(), what, shown(expected), shown(found)));
            }
        }
        Ok(())
    }

    /// Sidecars name the manifest's weights.
    fn check_hashes(&self) -> Result<()> {
        let expected = self.manifest.basis.model_hash;
        let values = self.values.iter().map(|values| (VALUE_FEEDBACK, values.model_hash));
        match values.chain([(KEY_TRANSFORMS, self.keys.model_hash)]).find(|(_, found)| *found != expected) {
            Some((name, found)) => Err(unfit(self.folder.join(name), "hash of the weights", expected, found)),
            None => Ok(()),
        }
    }

    /// Mean keys and feedback are there where the manifest says so.
    fn check_extras(&self) -> Result<()> {
        let solve = &self.manifest.solve;
        let has =
            |role: fn(&KeyLayer) -> &Option<Vec<f32>>| self.keys.layers.values().any(|layer| role(layer).is_some());
        let cases = [
            ("key_mean", solve.center_keys != NEVER, has(|layer| &layer.key_mean)),
            ("key_feedback", solve.feedback, has(|layer| &layer.key_feedback)),
        ];
        for (role, expected, found) in cases {
            if expected != found {
                let in_words = |there| if there { "in every layer" } else { "none" };
                let what = format!("{role}, by solve of the manifest");
                return Err(unfit(self.key_path(), what, in_words(expected), in_words(found)));
            }
        }
        Ok(())
    }

    /// Layers without a gap, the same in both sidecars.
    fn check_layers(&self) -> Result<()> {
        for (index, (&layer, entry)) in self.keys.layers.iter().enumerate() {
            if layer != index {
                return Err(unfit(self.key_path(), "layers", format!("layer {index}"), format!("layer {layer}")));
            }
            if let Some(values) = &self.values {
                let found = values.layers.get(&layer).map(|values| (values.n_kv_heads, values.head_dim));
                self.check_feedback(layer, Some(shape(entry)), found)?;
            }
        }
        let beyond = self
            .values
            .iter()
            .flat_map(|values| &values.layers)
            .find(|(layer, _)| !self.keys.layers.contains_key(layer));
        if let Some((&layer, values)) = beyond {
            self.check_feedback(layer, None, Some((values.n_kv_heads, values.head_dim)))?;
        }
        Ok(())
    }

    /// Layers, heads and centred heads are those of the solver's report, where there is one.
    fn check_report(&self) -> Result<()> {
        if self.manifest.layers.is_empty() {
            return Ok(());
        }
        let in_report = |layer: &LayerReport| (layer.layer, (layer.key.len(), layer.centered_keys.clone()));
        let expected: BTreeMap<_, _> = self.manifest.layers.iter().map(in_report).collect();
        let in_sidecar = |(&layer, entry): (&usize, &KeyLayer)| (layer, (entry.n_kv_heads, entry.centered_keys()));
        let found: BTreeMap<_, _> = self.keys.layers.iter().map(in_sidecar).collect();
        let differs = |layer: &&usize| expected.get(*layer) != found.get(*layer);
        let Some(layer) = expected.keys().chain(found.keys()).filter(differs).min() else { return Ok(()) };
        let in_words = |entry: Option<&(usize, Vec<usize>)>| {
            entry.map_or_else(
                || "no such layer".to_owned(),
                |(n_heads, centered)| format!("{n_heads} KV heads, of which {centered:?} are centred"),
            )
        };
        let what = format!("layer {layer}, by the manifest's report");
        Err(unfit(self.key_path(), what, in_words(expected.get(layer)), in_words(found.get(layer))))
    }

    fn check_feedback(
        &self,
        layer: usize,
        expected: Option<(usize, usize)>,
        found: Option<(usize, usize)>,
    ) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        let what = format!("value feedback of layer {layer}");
        Err(unfit(self.folder.join(VALUE_FEEDBACK), what, shown(expected), shown(found)))
    }
}

/// A file of `wush/` with the bytes that the manifest lists.
fn open_listed(folder: &Path, name: &str, manifest: &Manifest) -> Result<TensorFile> {
    let path = folder.join(name);
    let listed = format!("{WUSH_DIR}/{name}");
    let Some(entry) = manifest.files.iter().find(|file| file.path == listed) else {
        return Err(unfit(folder.join(MANIFEST), "files", &listed, "no such entry"));
    };
    if path.symlink_metadata().is_err() {
        return Err(unfit(path, "the file that the manifest lists", "it", "nothing"));
    }
    let file = TensorFile::open(&path)?;
    let found = Sha::of(file.bytes());
    if found == entry.sha256 {
        Ok(file)
    } else {
        Err(unfit(path, "SHA-256 that the manifest lists", entry.sha256, found))
    }
}

fn shape(layer: &KeyLayer) -> (usize, usize) {
    (layer.n_kv_heads, layer.head_dim)
}

/// `(KV heads, head dimension)` in words.
fn shown(shape: Option<(usize, usize)>) -> String {
    shape.map_or_else(
        || "none".to_owned(),
        |(n_kv_heads, head_dim)| format!("{n_kv_heads} KV heads of dimension {head_dim}"),
    )
}

fn unfit(path: PathBuf, what: impl Into<String>, expected: impl Display, found: impl Display) -> FormatError {
    let detail = format!("expected {expected}, found {found}");
    FormatError::Unfit { path, what: what.into(), detail }
}
