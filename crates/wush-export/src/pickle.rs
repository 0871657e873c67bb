//! The pickle program of a file of `torch.save`, in the twenty-odd opcodes that dictionaries, numbers, text and tensors take.
//!
//! Enters: values. Leaves: a program of protocol 2, and the tensors' storages in the order of their keys. The only names in it are
//! `torch._utils._rebuild_tensor_v2`, `torch.FloatStorage` and `collections.OrderedDict`, all of which
//! `torch.load(weights_only=True)` allows; nothing is memoized. Source: Python's `pickletools`, and what torch's own
//! serialization writes. Never reads a pickle.

use crate::{ExportError, Result, Tensor, Value};

/// Version of the protocol that follows.
const PROTO: [u8; 2] = [0x80, 2];
/// The program's end: the top of the stack is its value.
const STOP: u8 = b'.';
/// Marks where a tuple or the items of a dictionary begin.
const MARK: u8 = b'(';
/// An i32.
const BININT: u8 = b'J';
/// UTF-8 with its length before it.
const BINUNICODE: u8 = b'X';
/// False.
const NEWFALSE: u8 = 0x89;
/// A tuple of what follows the mark.
const TUPLE: u8 = b't';
/// A tuple of nothing.
const EMPTY_TUPLE: u8 = b')';
/// A dictionary of nothing.
const EMPTY_DICT: u8 = b'}';
/// Puts the keys and values after the mark into the dictionary before it.
const SETITEMS: u8 = b'u';
/// A name of a module: two lines.
const GLOBAL: u8 = b'c';
/// Calls what lies below a tuple of arguments.
const REDUCE: u8 = b'R';
/// What the reader knows by the identity on the stack: a storage.
const BINPERSID: u8 = b'Q';

/// Encodes one value.
///
/// # Errors
/// `TooLarge` for a number, a length or a text beyond what an opcode holds.
pub(crate) fn encode(value: &Value) -> Result<(Vec<u8>, Vec<&[f32]>)> {
    let mut encoder = Encoder { program: PROTO.to_vec(), storages: Vec::new() };
    encoder.value(value)?;
    encoder.op(STOP);
    Ok((encoder.program, encoder.storages))
}

struct Encoder<'a> {
    program: Vec<u8>,
    storages: Vec<&'a [f32]>,
}

impl<'a> Encoder<'a> {
    fn value(&mut self, value: &'a Value) -> Result<()> {
        match value {
            Value::Int(number) => self.int("number", *number),
            Value::Text(text) => self.text(text),
            Value::Dict(items) => self.dict(items),
            Value::Tensor(tensor) => self.tensor(tensor),
        }
    }

    fn dict(&mut self, items: &'a [(Value, Value)]) -> Result<()> {
        self.op(EMPTY_DICT);
        self.op(MARK);
        for (key, value) in items {
            self.value(key)?;
            self.value(value)?;
        }
        self.op(SETITEMS);
        Ok(())
    }

    /// `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`, contiguous and from its storage's start.
    fn tensor(&mut self, tensor: &'a Tensor) -> Result<()> {
        self.global("torch._utils", "_rebuild_tensor_v2");
        self.op(MARK);
        self.storage(tensor.data())?;
        self.int("storage offset", 0)?;
        self.dimensions(tensor.shape())?;
        self.dimensions(&tensor.strides())?;
        self.op(NEWFALSE);
        self.global("collections", "OrderedDict");
        self.op(EMPTY_TUPLE);
        self.op(REDUCE);
        self.op(TUPLE);
        self.op(REDUCE);
        Ok(())
    }

    /// `("storage", FloatStorage, key, "cpu", length)`: the bytes are the archive's entry `data/{key}`.
    fn storage(&mut self, data: &'a [f32]) -> Result<()> {
        let key = self.storages.len().to_string();
        self.op(MARK);
        self.text("storage")?;
        self.global("torch", "FloatStorage");
        self.text(&key)?;
        self.text("cpu")?;
        self.int("tensor length", data.len())?;
        self.op(TUPLE);
        self.op(BINPERSID);
        self.storages.push(data);
        Ok(())
    }

    fn dimensions(&mut self, dimensions: &[usize]) -> Result<()> {
        self.op(MARK);
        dimensions.iter().try_for_each(|&n| self.int("dimension", n))?;
        self.op(TUPLE);
        Ok(())
    }

    fn int(&mut self, what: &'static str, number: usize) -> Result<()> {
        let too_large = |_| ExportError::TooLarge { what, found: number, limit: i32::MAX as usize };
        let small = i32::try_from(number).map_err(too_large)?;
        self.op(BININT);
        self.program.extend(small.to_le_bytes());
        Ok(())
    }

    fn text(&mut self, text: &str) -> Result<()> {
        let too_large = |_| ExportError::TooLarge { what: "text", found: text.len(), limit: u32::MAX as usize };
        let len = u32::try_from(text.len()).map_err(too_large)?;
        self.op(BINUNICODE);
        self.program.extend(len.to_le_bytes());
        self.program.extend(text.as_bytes());
        Ok(())
    }

    fn global(&mut self, module: &'static str, name: &'static str) {
        self.op(GLOBAL);
        for line in [module, name] {
            self.program.extend(line.as_bytes());
            self.program.push(b'\n');
        }
    }

    fn op(&mut self, opcode: u8) {
        self.program.push(opcode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `pickletools.dis` shows for `{"a": 7}` in these opcodes.
    #[test]
    fn a_dictionary_is_what_python_reads() {
        let value = Value::Dict(vec![("a".into(), Value::Int(7))]);
        let (program, storages) = encode(&value).expect("small");
        assert_eq!(program, b"\x80\x02}(X\x01\0\0\0aJ\x07\0\0\0u.");
        assert!(storages.is_empty());
    }

    #[test]
    fn numbers_beyond_an_opcode_are_refused() {
        let largest = i32::MAX as usize;
        assert!(encode(&Value::Int(largest)).is_ok());
        let error = encode(&Value::Int(largest + 1)).expect_err("too large");
        assert!(matches!(error, ExportError::TooLarge { found, limit, .. } if found == limit + 1), "{error}");
    }

    #[test]
    fn each_tensor_has_a_storage_of_its_own() {
        let tensor = |x: f32| Value::Tensor(Tensor::new(vec![1, 2], vec![x; 2]).expect("two elements"));
        let value = Value::Dict(vec![("a".into(), tensor(1.0)), ("b".into(), tensor(2.0))]);
        let (program, storages) = encode(&value).expect("small");
        assert_eq!(storages, [[1.0; 2], [2.0; 2]]);
        for key in [&b"X\x01\0\0\x000"[..], b"X\x01\0\0\x001"] {
            assert!(program.windows(key.len()).any(|found| found == key), "{key:?}");
        }
    }
}
