//! One KV head's value and output weights, widened, with the half spacings of the stored numbers.

use faer::{Mat, MatRef};
use wush_checkpoint::Checkpoint;
use wush_model::spec::{AttentionSpec, TensorSlice};

use crate::number::Element;
use crate::{FoldError, Result};

/// The weights that a value fold touches, of one KV head. Half spacings are half the distance between neighbouring
/// numbers of the stored dtype: how far a rounding can have moved the element.
#[derive(Debug, Clone)]
pub struct HeadWeights {
    /// Global layer id.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// `[d, hidden]`.
    pub value: Mat<f64>,
    /// `[d, hidden]`.
    pub value_halves: Mat<f64>,
    /// `[d]` and its half spacings.
    pub bias: Option<(Vec<f64>, Vec<f64>)>,
    /// One `[hidden, d]` for every query head that reads this KV head.
    pub outputs: Vec<Mat<f64>>,
    /// As `outputs`.
    pub output_halves: Vec<Mat<f64>>,
}

impl HeadWeights {
    /// Reads and widens KV head `head` of layer `layer`.
    ///
    /// # Errors
    /// A tensor that is absent, of another shape, or of integers.
    pub fn read(checkpoint: &Checkpoint, attn: &AttentionSpec, layer: usize, head: usize) -> Result<Self> {
        let (dim, group) = (attn.head_dim, attn.n_heads / attn.n_kv_heads.max(1));
        let rows = |slice: &TensorSlice| slice.rows.start + head * dim..slice.rows.start + (head + 1) * dim;
        let value = &attn.v.weight;
        let (value, value_halves) = block(checkpoint, value, rows(value), 0..value.cols)?;
        let bias = attn.v.bias.as_ref().map(|bias| block(checkpoint, bias, rows(bias), 0..1)).transpose()?;
        let vector = |a: Mat<f64>| a.col(0).iter().copied().collect();
        let output = &attn.o.weight;
        let blocks = (head * group..(head + 1) * group)
            .map(|n| block(checkpoint, output, output.rows.clone(), n * dim..(n + 1) * dim))
            .collect::<Result<Vec<_>>>()?;
        let (outputs, output_halves) = blocks.into_iter().unzip();
        let bias = bias.map(|(bias, halves)| (vector(bias), vector(halves)));
        Ok(Self { layer, head, value, value_halves, bias, outputs, output_halves })
    }

    pub(crate) fn is_finite(&self) -> bool {
        let finite = |a: &Mat<f64>| a.col_iter().all(|col| col.iter().all(|x| x.is_finite()));
        finite(&self.value)
            && self.outputs.iter().all(finite)
            && self.bias.iter().all(|(bias, _)| bias.iter().all(|x| x.is_finite()))
    }

    /// A power of two that brings the bias to the weights' size, so that its rounding does not drown theirs.
    pub(crate) fn bias_scale(&self) -> f64 {
        let Some((bias, _)) = &self.bias else { return 1.0 };
        let rms = |sum: f64, n: usize| (sum / n.max(1) as f64).sqrt();
        let weights = rms(crate::dense::squared_norm(self.value.as_ref()), self.value.nrows() * self.value.ncols());
        let bias = rms(bias.iter().map(|x| x * x).sum(), bias.len());
        if bias > weights && weights > 0.0 { 2f64.powi(-((bias / weights).log2().ceil() as i32)) } else { 1.0 }
    }

    /// The weights with the bias times `scale` as one more column.
    pub(crate) fn with_bias(&self, scale: f64) -> Mat<f64> {
        append(self.value.as_ref(), self.bias.as_ref().map(|(bias, _)| bias.as_slice()), scale)
    }

    /// The half spacings of [`Self::with_bias`].
    pub(crate) fn halves_with_bias(&self, scale: f64) -> Mat<f64> {
        append(self.value_halves.as_ref(), self.bias.as_ref().map(|(_, halves)| halves.as_slice()), scale)
    }
}

fn append(weights: MatRef<'_, f64>, column: Option<&[f64]>, scale: f64) -> Mat<f64> {
    let n = weights.ncols();
    let extra = column.unwrap_or_default();
    Mat::from_fn(weights.nrows(), n + usize::from(column.is_some()), |i, j| {
        if j < n { weights[(i, j)] } else { extra[i] * scale }
    })
}

/// Rows and columns of a tensor, widened, and their half spacings.
fn block(
    checkpoint: &Checkpoint,
    slice: &TensorSlice,
    rows: std::ops::Range<usize>,
    cols: std::ops::Range<usize>,
) -> Result<(Mat<f64>, Mat<f64>)> {
    let view = checkpoint.tensor(&slice.name)?;
    let tensor = || slice.name.clone();
    let element =
        Element::of(view.dtype).ok_or_else(|| FoldError::WrongDtype { tensor: tensor(), dtype: view.dtype })?;
    let fits = view.bytes.len() / element.n_bytes() == slice.total_rows * slice.cols;
    if !fits || rows.end > slice.total_rows || cols.end > slice.cols {
        let found = format!("{:?}", view.shape);
        return Err(FoldError::WrongTensor { tensor: tensor(), rows: slice.total_rows, cols: slice.cols, found });
    }
    let mut line = vec![0.0; cols.len()];
    let mut values = Mat::zeros(rows.len(), cols.len());
    for (i, row) in rows.enumerate() {
        let start = (row * slice.cols + cols.start) * element.n_bytes();
        element.widen(&view.bytes[start..start + cols.len() * element.n_bytes()], &mut line);
        line.iter().enumerate().for_each(|(j, &x)| values[(i, j)] = x);
    }
    let halves = crate::dense::map(values.as_ref(), |x| element.half_ulp(x));
    Ok((values, halves))
}
